"""Checkpoints of small models, and a retrieval set in three forms, written once for all evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.checkpoints.export import export_local_dir
from support.scoring import COUNTS
from support.tars import write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    bert_text,
    captions,
    picture,
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


@pytest.fixture(scope="session")
def sets(tmp_path_factory) -> Path:
    """The same 13 test images as Karpathy's JSON, ZeroVL's table and in CLIP_benchmark's layout.

    The JSON holds a val image and a restval image more.
    """
    root = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    (root / "coco" / "val2014").mkdir(parents=True)
    images, members = [], []
    rows = ["image,image_id,caption,caption_id"]
    for i, count in enumerate([*COUNTS, 5, 5]):
        split = "test" if i < len(COUNTS) else ("val", "restval")[i - len(COUNTS)]
        name, content = f"COCO_val2014_{i:012d}.jpg", picture(rng, "JPEG")
        (root / "coco" / "val2014" / name).write_bytes(content)
        texts = captions(rng, count) if i else [f"<script>{n}</script> & x" for n in range(count)]
        image = {"filename": name, "filepath": "val2014", "split": split, "cocoid": 1000 + i}
        sentences = [{"raw": text, "sentid": 100 * i + j} for j, text in enumerate(texts)]
        images.append({**image, "imgid": i, "sentences": sentences})
        if split == "test":
            rows += [f"{name},{1000 + i},{each['raw']},{each['sentid']}" for each in sentences]
            members.append((f"{1000 + i}.jpg", content))
            members.append((f"{1000 + i}.txt", "\n".join(texts).encode()))
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    (root / "valid_anno.csv").write_text("\n".join(rows))
    write_tar(root / "wds" / "test" / "0.tar", members)
    (root / "wds" / "dataset_type.txt").write_text("retrieval")
    (root / "wds" / "test" / "nshards.txt").write_text("1")
    return root
