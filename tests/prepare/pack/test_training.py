"""Packed data is trained on and evaluated by the printed commands."""

from __future__ import annotations

import json
import shlex

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.finetune.data import find_data
from open_clip_zerovl.prepare.pack.packing import PackSettings, pack
from open_clip_zerovl.prepare.pack.report import commands
from open_clip_zerovl.prepare.pack.rows import Columns
from open_clip_zerovl.prepare.public.gather import Work
from support.pairs import as_csv, make_pairs
from support.programs import COMMON, launch
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION


@pytest.mark.slow  # a training process
def test_the_printed_command_trains_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.setattr("open_clip_zerovl.prepare.pack.report.FEWEST", 1)
    given = as_csv(tmp_path / "in", make_pairs(40))
    settings = PackSettings(test_share=0.2, columns=Columns(source="kind"))
    found = pack([str(given)], tmp_path / "out", settings, work=Work(threads=2, progress=False))
    tuning, command = commands(found, tmp_path / "out")
    assert tuning.startswith("zerovl finetune --from ") and find_data(shlex.split(tuning)[5]).held_out
    program, arguments = shlex.split(command)[:2], shlex.split(command)[2:]
    assert program == ["zerovl", "train"] and arguments[:2] == ["--model", "ViT-B-32"]
    assert "--debiased-sampling" in arguments and arguments[-2:] == ["--batch-size", "4"]
    (tmp_path / "tiny.json").write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT})
    )
    common = [flag for flag in COMMON if flag not in ("--warmup", "2")]  # the command has --warmup-share
    steps = [*common, *arguments[2:], "--dga-steps", "2", "--epochs", "1", "--workers", "1", "--name", "packed"]
    done = launch("ours", tmp_path / "tiny.json", steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    log = (tmp_path / "logs/packed/out.log").read_text()
    assert "source-a" in log and "source-b" in log and "rsum: " in log


def test_the_folder_of_one_source_is_its_retrieval_set_and_a_training_is_led_to_the_shards(tmp_path):
    """refused.csv, which lies in the folder, is no table of samples."""
    for name, column in (("one", None), ("two", "kind")):
        given = as_csv(tmp_path / f"in-{name}", make_pairs(40))
        settings = PackSettings(test_share=0.2, columns=Columns(source=column))
        pack([str(given)], tmp_path / name, settings, work=Work(threads=2, progress=False))
    assert len(open_retrieval_set(tmp_path / "one")) > 0
    for name, place in (("one", "one/train$"), ("two", "two/[a-z-]*/train, .*/train$")):
        with pytest.raises(UserError, match=f"shards.*: [^ ]*/{place}"):
            parse_sources(f"x={tmp_path / name}")
