"""Npm without a network: tarballs that tests write, and an `npm` that hands them out."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts.drawn.packages import NpmPackage
from support.tars import add_file


def tarball(path: Path, package: NpmPackage, files: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {
        "package.json": json.dumps({"name": package.name, "version": package.version}),
        **files,
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            add_file(tar, f"package/{name}", text.encode())


class Registry:
    """A folder of tarballs, and an `npm` on PATH that hands them out and writes down every call."""

    def __init__(self, folder: Path, tarballs: Callable[[Path], dict[str, Path]]) -> None:
        self.folder = folder / "registry"
        self.log = folder / "npm.log"
        self.faults = folder / "faults"  # one line a call to spoil: "broken" or "fail"
        self.tarballs = tarballs(self.folder)
        script = folder / "bin" / "npm"
        script.parent.mkdir()
        script.write_text(f"#!{sys.executable}\n{_NPM.format(folder=str(folder))}")
        script.chmod(0o755)
        self.bin = script.parent

    def stub(self, monkeypatch, packages: dict[str, NpmPackage]) -> Registry:
        """Put it in npm's place for this test; the made-up tarballs have other hashes."""
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr("scripts.drawn.packages.sleep", lambda seconds: None)
        for key, package in packages.items():
            monkeypatch.setitem(packages, key, replace(package, sha512=""))
        return self

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


_NPM = """
import pathlib, sys
home = pathlib.Path({folder!r})
assert sys.argv[1] == "pack"
name, _, version = sys.argv[2].rpartition("@")
with (home / "npm.log").open("a") as log:
    log.write(sys.argv[2] + "\\n")
faults = (home / "faults").read_text().split() if (home / "faults").exists() else []
(home / "faults").write_text(" ".join(faults[1:]))
file = name.lstrip("@").replace("/", "-") + "-" + version + ".tgz"
data = (home / "registry" / file).read_bytes()
if faults[:1] == ["fail"]:
    sys.stderr.write("npm error code ECONNRESET\\n")
    sys.exit(1)
pathlib.Path(file).write_bytes(data[: len(data) // 2] if faults[:1] == ["broken"] else data)
"""
