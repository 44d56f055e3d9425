"""Features of open_clip 4 alone: its own flags beside the recipe's, models of sounds, sharded checkpoints."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from open_clip_zerovl.models.build import check_model
from training import openclip_v4
from training.params import parse

ITS_FLAGS = "these flags are of open_clip 4"


@pytest.mark.line("4", reason=ITS_FLAGS)
def test_without_flags_of_ours_all_of_its_own_are_taken():
    line = "--train-data x.tar --fsdp --use-naflex --image-key png --wd-exclude *.bias --opt nadamw --torchcompile"
    args, config = parse(
        [*line.split(), "--model", "CLAP-HTSAT-tiny", "--dataset-type", "webdataset-audio"]
    )
    assert args.fsdp and args.torchcompile_strategy == "task" and not config.active
    check_model("CLAP-HTSAT-tiny")


def filled(newest: str | None):
    """The line's names with a run and a main that only name their caller."""
    stock = {name: lambda *_, name=name, **__: f"open_clip's {name}" for name in openclip_v4.NAMES}
    stock["get_latest_checkpoint"] = lambda path, remote: newest
    run = SimpleNamespace(
        args=Namespace(model="m"), model_name="m", own_step=True, own_schedule=False, own_adamw=False,
        create_model=None, newest_checkpoint=lambda path, remote: f"ours of {path}",
    )  # fmt: skip
    return openclip_v4.filled(run, SimpleNamespace(**stock))


def test_a_sharded_checkpoint_is_open_clips_to_find_and_to_load(tmp_path):
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
