"""Folders that were moved load: in this package as they are, in stock open_clip after `export --here`."""

from __future__ import annotations

import shutil
from pathlib import Path

import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.models.build import create_model_and_transforms
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)

TEXT = "a red cat"
OPEN_CLIP = ("clip", "bert")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Two folders below `made`: of open_clip's own towers, and of BERT."""
    home = tmp_path_factory.mktemp("moves")
    bert = write_bert(home / "bert")
    register(home / "configs", "moved-clip", NATIVE_VISION, CLIP_TEXT)
    register(home / "configs", "moved-bert", NATIVE_VISION, bert_text(bert))
    for name in OPEN_CLIP:
        run = write_run(home / name, random_model(f"moved-{name}"), {"model": f"moved-{name}"})
        export_local_dir(run, home / "made" / name)
    return home


def embedding(folder: Path) -> torch.Tensor:
    model, _, tokenizer = load_model(folder)
    with torch.no_grad():
        return model.encode_text(tokenizer([TEXT]), normalize=True)[0]


def stock_embedding(folder: Path) -> torch.Tensor:
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    with torch.no_grad():
        tokens = open_clip.get_tokenizer(f"local-dir:{folder}")([TEXT])
        return model.eval().encode_text(tokens, normalize=True)[0]


def test_folders_load_after_a_move(home, tmp_path, capsys):
    """In this package as they are, in stock open_clip after `export --here`."""
    expected = {name: embedding(home / "made" / name) for name in OPEN_CLIP}
    moved = Path(shutil.move(home / "made", tmp_path / "moved"))
    for name in OPEN_CLIP:  # this package needs nothing
        assert torch.equal(embedding(moved / name), expected[name]), name
    created = create_model_and_transforms(f"local-dir:{moved / 'bert'}")[0]  # as training does
    assert created.text.config.hidden_size == 32
    with pytest.raises(OSError, match="made/bert"):  # negative control
        stock_embedding(moved / "bert")
    for name in OPEN_CLIP:
        assert main(["export", str(moved / name), "--here"]) == 0
        assert torch.equal(stock_embedding(moved / name), expected[name]), name
    out = capsys.readouterr().out
    assert out.count("Its new path is written") == out.count("Nothing had to be changed") == 1
    shutil.move(moved, home / "made")
