"""Late imports: a package's public names are imported when they are first used (PEP 562).

torch, timm and transformers take seconds to import, and a help text does not need them. So `import open_clip_zerovl` and
`import open_clip_zerovl.cli` do not import them.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]], packages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that offers names of its modules without importing them.

        __getattr__, __dir__, __all__ = lazy_exports(__name__, {"open_clip_zerovl.dga.step": ["DecoupledGradientAccumulation"]})

    Args:
        package: the package's `__name__`.
        names: full name of a module -> its public names that the package offers.
        packages: names of packages within this one that it offers as they are.
    """
    home = {name: module for module, group in names.items() for name in group}
    offered = sorted([*home, *packages])

    def find(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *offered}), offered


def make_callable(package: str, function: str) -> None:
    """Let a package be called as the function of the same name: `open_clip_zerovl.align(...)`.

    An import of `open_clip_zerovl.align.rows` sets the attribute `align` of `open_clip_zerovl` to the package, whatever it was
    before. So the package itself stands for the function, in any order of imports.

    Args:
        package: the package's `__name__`.
        function: `module:name`, imported at the first call.
    """
    module, _, name = function.partition(":")

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*args, **kwargs)

        @property
        def __signature__(self) -> Any:
            import inspect  # not at the top: it takes as long as the rest

            return inspect.signature(getattr(importlib.import_module(module), name))

    sys.modules[package].__class__ = CallablePackage


def load_open_clip() -> None:
    """Import torch and open_clip in a program that has not done so, without searching for garbage (see `uncollected`)."""
    if "open_clip" not in sys.modules:
        with uncollected():
            importlib.import_module("open_clip")


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages in the block without garbage collection, which takes a fifth of the CPU time of `import open_clip`.

    The collector would search the 400,000 objects of the modules again and again. Those stay until the process ends, so that
    later collections leave them out, too. For programs: memory that the caller made before is not collected either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
