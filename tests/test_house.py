"""The rooms of `src/` and the arrows between them, read from the imports: an arrow goes down, and never in a circle."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support import ROOT

SRC = ROOT / "src"
# From the ground up: a room imports only from lower rows.
FLOORS = (
    ("core",),
    ("losses", "sampling", "shards", "models", "report"),
    ("dga", "data", "checkpoints"),
    ("features",),
    ("recipe", "evaluate", "prepare"),
    ("training", "align", "finetune"),
    ("trial",),
    ("api",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


@cache
def modules(src: Path = SRC) -> dict[str, frozenset[str]]:
    """Module name -> full names of its imports, for all packages under a folder."""
    found = {}
    for file in sorted(src.rglob("*.py")):
        parts = file.relative_to(src).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = imports_of(file.read_text(encoding="utf-8"), name)
    return found


def room_of(module: str) -> str:
    """`open_clip_zerovl.data.sources` -> `data`; `training.main` -> `training`; the package itself -> ``."""
    first, *rest = module.split(".")
    if first != "open_clip_zerovl":
        return first
    return "api" if rest in (["results"], ["doctor"]) else "".join(rest[:1])


def imports_of(code: str, module: str) -> frozenset[str]:
    """Full names of a module's imports, inside functions too: `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{module}:{node.lineno} imports relatively; write the full name"
            )
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def arrows(known: dict[str, frozenset[str]]) -> set[tuple[str, str]]:
    """(module, module it imports), both of `src`; a package's `__init__` that only hands names on is not followed."""
    return {
        (module, target)
        for module, imported in known.items()
        for target in imported & known.keys() - {module, "open_clip_zerovl"}
        if not module.startswith(f"{target}.")
    }


def faults(known: dict[str, frozenset[str]]) -> list[str]:
    """Broken rules, as sentences; of circles the first."""
    edges = sorted(arrows(known))
    rooms = [(module, target, room_of(module), room_of(target)) for module, target in edges]
    found = [
        f"{module} imports {target}: the room {there} does not stand below {here}"
        for module, target, here, there in rooms
        if here not in (there, "") and LEVEL[there] >= LEVEL[here]
    ]
    order: TopologicalSorter[str] = TopologicalSorter()
    for module, target in edges:
        order.add(module, target)
    try:
        order.prepare()
    except CycleError as error:
        found.append(f"modules import each other in a circle: {' <- '.join(error.args[1])}")
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(module) for module in modules()} - {""}
    assert rooms == set(LEVEL), "a new room needs its row in FLOORS and in docs/architecture.md"


def test_arrows_go_down_and_never_in_a_circle():
    assert faults(modules()) == []


def test_only_training_imports_open_clips_training_program():
    importing = {
        name
        for name, found in modules().items()
        if any(one.split(".")[0] == "open_clip_train" for one in found)
    }
    assert {room_of(name) for name in importing} == {"training"}


def test_the_page_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in LEVEL if f"`{room}`" not in page and f"{room}/" not in page] == []


@pytest.mark.parametrize(
    ("module", "line", "sentence"),
    [
        (
            "shards.tar",
            "from open_clip_zerovl.data.sources import Source",
            "does not stand below shards",
        ),
        (
            "data.sources",
            "from open_clip_zerovl.prepare import pack",
            "does not stand below data",
        ),
        ("core.errors", "def f():\n    import training.main", "does not stand below core"),
        ("shards.tar", "from open_clip_zerovl.shards.files import TarIndex", "in a circle"),
    ],
)
def test_a_planted_arrow_up_or_circle_is_found(module, line, sentence):
    name = f"open_clip_zerovl.{module}"
    planted = modules() | {name: modules()[name] | imports_of(line, name)}
    assert any(sentence in fault for fault in faults(planted))
