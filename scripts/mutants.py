"""Mutants: small changes of src whose wrong result would be silent. Each must fail its test.

    python -m scripts.mutants --jobs 2                         # all of mutants.yaml
    python -m scripts.mutants --only claim-replaced dga        # these, by their ids or rooms

The tests run once on src as it is, since a test that fails anyway proves nothing; then one test for each mutant, in a copy of
src and tests. The exit status is 1 if a mutant survives, or if its text does not occur exactly once in its file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        file: path from the repository's root.
        old: a text that occurs exactly once in the file; `new` replaces it.
        test: the file or node of tests that must fail.
        why: what the wrong result is.
    """

    id: str
    file: str
    old: str
    new: str
    test: str
    why: str

    def mutated(self) -> str | None:
        """Return the file's content with the change, or None unless `old` occurs exactly once."""
        content = (ROOT / self.file).read_text(encoding="utf-8")
        return content.replace(self.old, self.new) if content.count(self.old) == 1 else None


def load() -> dict[str, Mutant]:
    """Read all mutants of the list by their ids."""
    return {
        entry["id"]: Mutant(**entry)
        for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    }


def status_of(tests: list[str], folder: Path) -> int:
    """Return pytest's exit status of some tests in a folder, by one warm Python that has torch and open_clip."""
    from support import warm

    return subprocess.run(
        [warm.python(), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "WARM_PYTHON": warm.python()},
        capture_output=True,
    ).returncode


def dies(mutant: Mutant) -> bool:
    """Return whether its test fails in a copy of the repository that has the mutant, and print its line."""
    end = "text not found"
    if content := mutant.mutated():
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            for entry in ROOT.iterdir():
                # tests/conftest.py takes src from beside itself, so that both are copied.
                (shutil.copytree if entry.name in ("src", "tests", "scripts") else os.symlink)(
                    entry, Path(folder, entry.name)
                )
            Path(folder, mutant.file).write_text(content, encoding="utf-8")
            status = status_of([mutant.test], Path(folder))
        end = {0: "SURVIVED", 1: "died"}.get(status, "test did not run")
    print(f"{end:16} {mutant.id:24} {mutant.file}: {mutant.why}", flush=True)
    return end == "died"


def main() -> int:
    mutants = load()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rooms = {part for mutant in mutants.values() for part in Path(mutant.file).parts[:-1]}
    parser.add_argument("--only", nargs="+", choices=[*mutants, *rooms], metavar="ID|ROOM")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    asked = parser.parse_args()
    wanted = {*(asked.only or mutants)}
    chosen = [m for m in mutants.values() if wanted & {m.id, *Path(m.file).parts[:-1]}]
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if status_of(sorted({mutant.test for mutant in chosen}), ROOT):
        sys.exit("a test of the list fails without a mutant; run the tests first")
    with ThreadPoolExecutor(asked.jobs) as pool:
        died = sum(pool.map(dies, chosen))
    print(f"{len(chosen)} mutants, {died} died")
    return int(died < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
