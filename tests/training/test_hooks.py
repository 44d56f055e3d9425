"""Replacements in open_clip's main: a line of releases whose names and signatures are known, each really used."""

from argparse import Namespace
from types import ModuleType, SimpleNamespace

import open_clip
import open_clip_train.main as host
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.releases import OPENCLIP_V3, OPENCLIP_V4, line_of
from open_clip_zerovl.models.build import check_model
from training import hooks, run
from training.params import parse

V3, V4 = hooks.LINES[OPENCLIP_V3], hooks.LINES[OPENCLIP_V4]


def main_with(line, *, without: str = "", unused: str = "", other: str = "") -> ModuleType:
    """A stub for open_clip_train.main whose globals are the line's hooks, with one thing wrong."""
    module = ModuleType("open_clip_train.main")
    lines = []
    for name, parameters in line.names.items():
        function = {}
        exec(f"def {name}({', '.join(('x',) if name == other else parameters)}): pass", function)
        if name != without:
            value = SimpleNamespace(AdamW=function[name]) if name == "optim" else function[name]
            setattr(module, name, value)
        if name != unused:
            lines.append(f"    {name}")
    exec("def main(args):\n" + "\n".join(lines), vars(module))
    return module


@pytest.mark.parametrize("version", ["3.2.0", "3.4.1", "2.30.0", "5.0.0"])
def test_a_release_whose_main_was_not_read_is_refused(version):
    with pytest.raises(
        UserError,
        match=rf"open_clip_torch {version} is not supported, 3\.3\.x and 4\.x are; pip install",
    ):
        hooks.check_host(main_with(V3), version)


@pytest.mark.parametrize("version", ["3.3.0", "4.2.0.dev0", "3.3.9", "4.2.0", "4.2.1", "4.0.2"])
def test_a_version_that_was_not_tested_is_taken_with_a_warning(monkeypatch, caplog, version):
    """The names of main are looked at all the same; other changes stay unknown."""
    monkeypatch.setattr(open_clip, "__version__", version)
    monkeypatch.setattr(run, "check_host", lambda: hooks.LINES[line_of(version)])
    args, config = parse(["--dataset-type", "synthetic", "--device", "foo"])
    with pytest.raises(RuntimeError, match="device string: foo"):  # after the warning
        run.train(args, config)
    told = f"Not tested with open_clip_torch {version}: tested with 3.3.0 and main" in caplog.text
    assert told == (version not in ("3.3.0", "4.2.0.dev0"))


@pytest.mark.parametrize(("line", "version"), [(V3, "3.3.0"), (V4, "4.2.0.dev0")])
@pytest.mark.parametrize("name", ["get_data", "train_one_epoch", "cosine_lr"])
def test_a_name_that_is_missing_unused_or_other_is_refused(line, version, name):
    assert hooks.check_host(main_with(line), version) is line
    with pytest.raises(UserError, match=rf"has no {name}\("):
        hooks.check_host(main_with(line, without=name), version)
    with pytest.raises(UserError, match=rf"has no {name}\(.* found \('x',\)"):
        hooks.check_host(main_with(line, other=name), version)
    with pytest.raises(UserError, match=f"has {name} and does not use it"):
        hooks.check_host(main_with(line, unused=name), version)


def test_a_parameter_that_a_replacement_does_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(
        host, "cosine_lr", lambda optimizer, base_lr, warmup_length, steps, floor=0.0: None
    )
    known = {"cosine_lr": lambda optimizer, base_lr, warmup_length, steps: None}
    with (
        pytest.raises(UserError, match="'floor' of cosine_lr .* does not know"),
        hooks.replaced(known),
    ):
        pass
    with hooks.replaced({"cosine_lr": lambda *given, **more: None}):
        pass


def test_what_is_replaced_is_put_back():
    before = host.get_data
    with pytest.raises(ZeroDivisionError), hooks.replaced({"get_data": None}):
        assert host.get_data is None
        raise ZeroDivisionError
    assert host.get_data is before


@pytest.mark.line("4", reason="these flags are of open_clip 4")
def test_without_flags_of_ours_all_of_its_own_are_taken():
    line = "--train-data x.tar --fsdp --use-naflex --image-key png --wd-exclude *.bias --opt nadamw --torchcompile"
    args, config = parse(
        [*line.split(), "--model", "CLAP-HTSAT-tiny", "--dataset-type", "webdataset-audio"]
    )
    assert args.fsdp and args.torchcompile_strategy == "task" and not config.active
    check_model("CLAP-HTSAT-tiny")


def filled(newest: str | None):
    """The line's names with a run and a main that only name their caller."""
    stock = {name: lambda *_, name=name, **__: f"open_clip's {name}" for name in V4.names}
    stock["get_latest_checkpoint"] = lambda path, remote: newest
    run = SimpleNamespace(
        args=Namespace(model="m"), model_name="m", own_step=True, own_schedule=False, own_adamw=False,
        create_model=None,
    )  # fmt: skip
    return V4.filled(run, SimpleNamespace(**stock))


def test_a_sharded_checkpoint_is_open_clips_to_find_and_to_load(tmp_path, monkeypatch):
    monkeypatch.setattr("training.hooks.newest_whole", lambda path, remote=False: f"ours of {path}")
    folder = tmp_path / "epoch_2"
    folder.mkdir()
    (tmp_path / "epoch_3.pt").touch()
    for newest, found in (
        (str(folder), str(folder)),
        (str(tmp_path / "epoch_3.pt"), "ours of x"),
        (None, "ours of x"),
    ):
        assert filled(newest)["get_latest_checkpoint"]("x", remote=False) == found
    assert filled(str(folder))["get_latest_checkpoint"]("x", remote=True) == "ours of x"
