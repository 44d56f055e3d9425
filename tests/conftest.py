"""Before any test: one thread a process, no hub, and child processes that import this checkout and `tests/support`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import warm

ROOT = Path(__file__).resolve().parent.parent

# Under nohup the programs that tests start would inherit that SIGHUP is ignored, which a training respects.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Before torch is imported anywhere: the test machine has few cores and many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What a test packs on its way is not put into the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="zerovl-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
_BEFORE = (
    [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
)  # where `make gpu` keeps unpacked wheels
# OPEN_CLIP_SOURCE=DIR runs the tests on another open_clip: a folder that holds the packages open_clip and open_clip_train.
_OTHER = (
    [os.path.abspath(os.environ["OPEN_CLIP_SOURCE"])] if os.environ.get("OPEN_CLIP_SOURCE") else []
)
for _name in ("open_clip", "open_clip_train"):
    if _OTHER and not Path(_OTHER[0], _name, "__init__.py").is_file():
        raise pytest.UsageError(
            f"OPEN_CLIP_SOURCE={_OTHER[0]} holds no package {_name}; give the folder src of a checkout"
        )
sys.path[:0] = _OTHER
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_OTHER, *map(str, (ROOT / "src", ROOT / "tests", ROOT)), *_BEFORE]
)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    """In the controller: one warm Python for all workers, which run by it themselves."""
    for spec in specs:
        spec.python = warm.python()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    node.workerinput["warm_python"] = warm.python()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        warm.share(config.workerinput["warm_python"])
        # A torchrun that a test starts by `sys.executable` has ranks of it.
        os.environ.pop("PYTHON_EXEC", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one line of open_clip are skipped on the other line, and the reason names the line."""
    marked = [
        (item, mark) for item in items if (mark := item.get_closest_marker("line")) is not None
    ]
    if not marked:
        return
    import open_clip

    here = open_clip.__version__
    for item, mark in marked:
        (line,) = mark.args
        if not here.startswith(f"{line}."):
            how = "; OPEN_CLIP_SOURCE=DIR runs the tests on a checkout of it" if not _OTHER else ""
            reason = f"of open_clip {line} alone, this is {here}: {mark.kwargs['reason']}{how}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Remove the handlers that a test leaves at the root logger: open_clip's main adds some, whose stream pytest closes."""
    before, level = list(logging.root.handlers), logging.root.level
    yield
    for handler in [handler for handler in logging.root.handlers if handler not in before]:
        logging.root.removeHandler(handler)
        handler.close()
    logging.root.setLevel(level)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
