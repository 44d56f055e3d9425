"""The rooms of `src/` and the arrows between them, read from the imports: an arrow goes down, and never in a circle."""

import ast
from pathlib import Path

import pytest

from support import ROOT

SRC = ROOT / "src"
# From the ground up: a room imports what stands in a lower row, and nothing of its own row or above.
FLOORS = (
    ("core",),
    ("losses", "shards", "models", "report"),
    ("dga", "data", "checkpoints"),
    ("embeddings",),
    ("recipe", "distill", "evaluate", "prepare"),
    ("plan", "training", "align"),
    ("finetune",),
    ("cli",),
)
# Documented import paths that only hand names on.
FACES = ("open_clip_zerovl.retrieval",)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules(src: Path) -> dict[str, Path]:
    """Module name -> file, of all packages under a folder."""
    names = {}
    for file in sorted(src.rglob("*.py")):
        parts = file.relative_to(src).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def room_of(module: str) -> str:
    """`open_clip_zerovl.data.sources` -> `data`; `training.main` -> `training`; the package itself -> ``."""
    first, *rest = module.split(".")
    if module in FACES:
        return ""
    return (rest[0] if rest else "") if first == "open_clip_zerovl" else first


def imports_of(file: Path) -> set[str]:
    """Full names of what a file imports, inside functions too: `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively; write the full name"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def arrows(src: Path) -> set[tuple[str, str]]:
    """(module, module it imports), both of `src`; a package's `__init__` that only hands names on is not followed."""
    known = modules(src)
    return {
        (module, target)
        for module, file in known.items()
        for target in imports_of(file)
        if target in known and target != module and target != "open_clip_zerovl" and not module.startswith(f"{target}.")
    }


def faults(src: Path) -> list[str]:
    """What breaks the rules, as sentences."""
    said = []
    for module, target in sorted(arrows(src)):
        here, there = room_of(module), room_of(target)
        if here == there or here == "":
            continue
        if LEVEL[there] >= LEVEL[here]:
            said.append(f"{module} imports {target}: the room {there} does not stand below {here}")
    return said + [f"modules import each other in a circle: {' -> '.join(circle)}" for circle in circles(arrows(src))]


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Circles in a graph, one for each that a depth-first walk meets."""
    follows: dict[str, list[str]] = {}
    for start, end in sorted(edges):
        follows.setdefault(start, []).append(end)
    found, done = [], set()

    def walk(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for target in follows.get(node, ()):
                walk(target, [*path, node])
            done.add(node)

    for node in list(follows):
        walk(node, [])
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(module) for module in modules(SRC)} - {""}
    assert rooms == set(LEVEL), "a new room needs its row in FLOORS and in docs/architecture.md"


def test_arrows_go_down_and_never_in_a_circle():
    assert faults(SRC) == []


def test_only_training_imports_open_clips_training_program():
    others = [
        module
        for module, file in modules(SRC).items()
        if room_of(module) != "training" and any(name.split(".")[0] == "open_clip_train" for name in imports_of(file))
    ]
    assert others == []


def test_the_page_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in LEVEL if f"`{room}`" not in page and f"{room}/" not in page] == []


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        ("shards/members.py", "from open_clip_zerovl.data.sources import Source", "does not stand below shards"),
        ("data/sources.py", "from open_clip_zerovl.prepare.pack import run", "does not stand below data"),
        ("core/errors.py", "def f():\n    import training.main", "does not stand below core"),
        ("shards/members.py", "from open_clip_zerovl.shards.index import TarIndex", "in a circle"),
    ],
)
def test_a_planted_arrow_up_or_circle_is_found(tmp_path, file, line, sentence):
    for module in modules(SRC).values():
        copy = tmp_path / module.relative_to(SRC)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(module.read_text(encoding="utf-8"), encoding="utf-8")
    planted = tmp_path / "open_clip_zerovl" / file
    planted.write_text(planted.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    assert any(sentence in fault for fault in faults(tmp_path))
