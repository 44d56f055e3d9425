"""Checkpoints of small models, written once for all evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from open_clip_zerovl.checkpoints.export import export_local_dir
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)


@pytest.fixture(scope="session")
def clip_runs(tmp_path_factory) -> list[str]:
    """Checkpoints of two seeds of a small CLIP."""
    folder = tmp_path_factory.mktemp("clip")
    name = register(folder, "evaluated-clip", NATIVE_VISION, CLIP_TEXT)
    return [
        str(write_run(folder / f"run{s}", random_model(name, seed=s), {"model": name}))
        for s in range(2)
    ]


@pytest.fixture(scope="session")
def bert_runs(tmp_path_factory) -> list[str]:
    """Checkpoints of two seeds of a small ViT + BERT."""
    folder = tmp_path_factory.mktemp("bert")
    name = register(folder, "evaluated-bert", NATIVE_VISION, bert_text(write_bert(folder / "bert")))
    params = {"model": name, "image_mean": (0.5, 0.4, 0.3)}
    return [
        str(write_run(folder / f"run{s}", random_model(name, seed=s), params)) for s in range(2)
    ]


@pytest.fixture(scope="session")
def export(bert_runs, tmp_path_factory) -> Path:
    """The first of `bert_runs` as an exported folder."""
    return export_local_dir(bert_runs[0], tmp_path_factory.mktemp("export") / "export")
