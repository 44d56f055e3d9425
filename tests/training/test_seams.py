"""What is replaced in open_clip's main: a line of releases whose names and signatures are known, each really used."""

from types import ModuleType, SimpleNamespace

import open_clip
import open_clip_train.main as host
import pytest

from open_clip_zerovl.errors import UserError
from training import line_3, line_4, seams


def main_with(line, *, without: str = "", unused: str = "", other: str = "") -> ModuleType:
    """A stand-in for open_clip_train.main whose globals are the line's seams, with one thing wrong."""
    module = ModuleType("open_clip_train.main")
    lines = []
    for name, parameters in line.SEAMS.items():
        function = {}
        exec(f"def {name}({', '.join(('x',) if name == other else parameters)}): pass", function)
        if name != without:
            value = SimpleNamespace(AdamW=function[name]) if name == "optim" else function[name]
            setattr(module, name, value)
        if name != unused:
            lines.append(f"    {name}")
    exec("def main(args):\n" + "\n".join(lines), vars(module))
    return module


def test_the_installed_open_clip_is_of_a_supported_line():
    line = seams.check_host()
    assert open_clip.__version__.startswith(line.VERSIONS)
    assert set(line.SEAMS) <= set(host.main.__code__.co_names)


@pytest.mark.parametrize(("line", "version"), [(line_3, "3.3.0"), (line_4, "4.2.0.dev0")])
def test_each_line_is_known_by_its_version_and_its_names(line, version):
    assert seams.check_host(main_with(line), version) is line


@pytest.mark.parametrize("version", ["3.2.0", "3.4.1", "2.30.0", "5.0.0"])
def test_a_release_whose_main_was_not_read_is_refused(version):
    with pytest.raises(UserError, match=rf"open_clip_torch {version} is installed, and 3\.3\.x and 4\.x are supported"):
        seams.check_host(main_with(line_3), version)


@pytest.mark.parametrize(("line", "version"), [(line_3, "3.3.0"), (line_4, "4.2.0.dev0")])
@pytest.mark.parametrize("name", ["get_data", "train_one_epoch", "cosine_lr"])
def test_a_name_that_is_missing_unused_or_other_is_refused(line, version, name):
    with pytest.raises(UserError, match=rf"has no {name}\("):
        seams.check_host(main_with(line, without=name), version)
    with pytest.raises(UserError, match=rf"has no {name}\(.* found \('x',\)"):
        seams.check_host(main_with(line, other=name), version)
    with pytest.raises(UserError, match=f"has {name} and does not use it"):
        seams.check_host(main_with(line, unused=name), version)


def test_main_4_imports_optim_and_does_not_use_it():
    """The guard of names alone would let 3.3's table pass there, and its optimizer would do nothing."""
    with pytest.raises(UserError, match="has optim and does not use it"):
        seams.check_host(main_with(line_3, unused="optim"), "3.3.9")


def test_what_is_replaced_is_put_back():
    line, before = seams.check_host(), host.get_data
    with pytest.raises(ZeroDivisionError), seams.replaced({"get_data": None}):
        assert host.get_data is None
        raise ZeroDivisionError
    assert host.get_data is before
    with pytest.raises(KeyError, match="are no seams"), seams.replaced({"nothing": None}):
        pass
    assert line in seams.LINES
