"""Packed data is trained on and evaluated by the printed commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import open_clip
import pytest

from open_clip_zerovl.cli import main
from open_clip_zerovl.data.sets import open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from support.programs import COMMON, launch
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_classes,
    write_run,
)
from training.data import with_positives
from training.params import parse


def packed_classes(folder: Path, capsys) -> Path:
    """Drawn pictures in CLASS/*.png as they lie, one of them broken, packed by the command; a quarter is held out."""
    given, out = write_classes(folder / "in", "cat house moon", each=12), folder / "out"
    (given / "cat" / "broken.png").write_bytes(b"no picture")
    assert main(["data", "pack", str(given), "--out", str(out), "--test-share", "0.25"]) == 0
    assert (
        "folders of classes, 3 classes ('cat', 'house', 'moon'; one level)"
        in capsys.readouterr().out
    )
    return out


def scored(checkpoint: Path, out: Path, capsys) -> float:
    """Top-1 of `zerovl zero-shot` on the held-out pictures, as it is printed."""
    assert main(["zero-shot", str(checkpoint), "--data", f"held={out}", "--device", "cpu"]) == 0
    row = re.search(r"^held +10 +3 +(\S+) \[", capsys.readouterr().out, re.MULTILINE)
    assert row is not None
    return float(row[1])


def test_packed_folders_of_classes_take_captions_as_positives_and_are_scored(
    tmp_path, capsys, caplog
):
    out = packed_classes(tmp_path, capsys)
    assert (out / "refused.csv").is_file() and len(
        open_retrieval_set(out)
    ) == 10  # the set, not the table of refusals
    caplog.set_level("INFO")
    args, config = parse(["--train-data", f"mine={out}/train", "--batch-size", "4"])
    assert with_positives(config, parse_sources(args.train_data)).positives == "caption"
    assert "Pictures of a class share its captions (source mine)" in caplog.text
    name = register(tmp_path, "classes", NATIVE_VISION, CLIP_TEXT)
    assert (
        0
        <= scored(write_run(tmp_path / "run", random_model(name), {"model": name}), out, capsys)
        <= 100
    )


@pytest.mark.slow  # a training process
def test_folders_of_classes_are_packed_trained_on_and_scored(tmp_path, capsys):
    out, config = packed_classes(tmp_path, capsys), tmp_path / "tiny.json"
    config.write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT})
    )
    words = f"--train-data mine={out}/train --zero-shot-data held={out} --batch-size 4 --dga-steps 3 --epochs 1 --workers 0"
    done = launch("ours", config, [*COMMON, *words.split(), "--name", "run"], cwd=tmp_path)
    assert "Pictures of a class share its captions (source mine)" in done.stderr + done.stdout
    log = (tmp_path / "logs/run/out.log").read_text()
    assert "positives: caption" in log
    assert "of 10 pictures, chance 33.3 %" in log and "Train Epoch: 0" in log
    open_clip.add_model_config(str(config))
    row = json.loads((tmp_path / "logs/run/checkpoints/results.jsonl").read_text())
    printed = scored(tmp_path / "logs/run/checkpoints/epoch_1.pt", out, capsys)
    assert printed == pytest.approx(100 * row["held_top1"], abs=0.05)
