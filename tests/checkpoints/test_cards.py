"""Model cards name every flag that a run was given, its data with sizes, and its scores with chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard as HubCard

from open_clip_zerovl.checkpoints.card import _ELSEWHERE, ModelCard, folder_card
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import ModelSpec
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.core.releases import OPENCLIP_V4, line_here
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.results import Run
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run
from training.params import open_clip_parser

# Entries of params.txt that are no flags.
COMPUTED = {
    "checkpoint_path", "distributed", "local_rank", "log_level", "log_path", "rank", "save_logs", "tensorboard",
    "tensorboard_path", "wandb", "world_size",
}  # fmt: skip
PREPROCESS = {
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "resize_mode": "shortest",
    "interpolation": "bicubic",
}
SPEC = ModelSpec(
    "tiny", {"embed_dim": 8, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}, PREPROCESS
)


def every_flag() -> set[str]:
    stock = {action.dest for action in open_clip_parser()._actions} - {"help"}
    return stock | {each.name for each in flags_of(RecipeConfig)}


def test_a_card_names_each_flag_of_training_or_has_a_line_of_its_own_for_it():
    """A new flag is on the card, or whoever adds it says that it changes no weight."""
    given = dict.fromkeys(every_flag(), "7")
    card = ModelCard(SPEC, {}, "x", params={**given, "batch_size": 4, "dga_steps": 2}, given=given)
    text = card.text()
    for name in every_flag() - _ELSEWHERE:
        assert f"`--{name.replace('_', '-')}`: 7" in text, name
    assert "effective batch: 8 = 4 a micro-batch x 2 accumulated" in text
    gone = set() if line_here() is not OPENCLIP_V4 else {"horovod", "trace", "torchscript"}
    assert _ELSEWHERE - every_flag() == COMPUTED | gone


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    name = register(tmp_path / "configs", "carded", NATIVE_VISION, CLIP_TEXT)
    params = {
        "model": name, "name": "my-run", "epochs": 3, "batch_size": 64, "world_size": 2, "dga_steps": 4, "beta1": 0.9,
        "lr": 0.001, "siglip": True, "sampling": "debiased", "mixup_alpha": 0.1, "init_from": "/secret/old.pt",
        "train_data": "a=/secret/a/{0..3}.tar::/secret/b/{0..9}.tar", "train_data_upsampling_factors": "1::2",
    }  # fmt: skip
    model = random_model(name, init_logit_bias=-10)
    checkpoint = write_run(tmp_path / "run", model, params)
    settings = {
        "siglip": "True",
        "init_from": "/secret/start.pt",
        "ablate": "('no-replay',)",
        "lr": "0.001",
        "sampling": "debiased",
        "mixup_alpha": "0.1",
    }
    chance = {"shop": {"rsum": 90.0, "rsum_chance": 16.5}}
    record = [
        {
            "kind": "start",
            "at": 0,
            "time": 0,
            "settings": settings,
            "sources": {"a": 12345, "b": 7},
        },
        {"kind": "retrieval", "at": 1, "time": 1, "metrics": chance},
        {
            "kind": "zero-shot",
            "at": 1,
            "time": 1,
            "metrics": {"pets": {"top1": 0.5, "top1_chance": 0.1}},
        },
    ]
    lines = "".join(json.dumps(line) + "\n" for line in record)
    (tmp_path / "run" / "record.jsonl").write_text(lines)
    recalls = {
        f"shop_{way}_R@{k}": 0.15 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)
    }
    row = {"epoch": 1, **recalls, "shop_rsum": 90.0, "pets_top1": 0.5, "num_samples": 8}
    of_another = {"epoch": 2, "pets_top1": 0.75}
    of_open_clip = {"imagenet-zeroshot-val-top1": 0.3}  # its zero-shot metrics alone have no epoch
    lines = "".join(json.dumps(line) + "\n" for line in (row, of_another, of_open_clip))
    (checkpoint.parent / "results.jsonl").write_text(lines)
    return checkpoint


def test_the_card_of_a_run_and_what_the_hub_reads_of_it(checkpoint, tmp_path):
    """Flags, sizes and chance are the record's; a later export and a model between two keep what the weights stand on."""
    file = export_local_dir(checkpoint, tmp_path / "export") / "README.md"
    text = file.read_text()
    for told in (
        "# my-run (carded)",
        "after epoch 1 of 3. It loads in stock",
        "- effective batch: 512 = 64 a micro-batch x 4 accumulated x 2 ranks",
        "- `--siglip`: True\n",
        "- `--sampling`: debiased\n",
        "- `--mixup-alpha`: 0.1\n",
        "- `--ablate`: ('no-replay',)\n",
        "- `--init-from`: old.pt\n",
        "- a, 12,345 samples, weight 1\n- b, 7 samples, weight 2\n",
        "| shop | text to image R@5 in % | 15.0 |\n",
        "| pets | top1 in % (chance 10.0) | 50.0 |\n",
    ):
        assert told in text, told
    for left_out in ("75.0", "/secret", str(tmp_path), "open_clip_zerovl", "num_samples"):
        assert left_out not in text, left_out
    assert Run(tmp_path / "run").scores.keys() == {1, 2}
    card = HubCard.load(file).data
    scores = {(one.dataset_name, one.metric_type): one for one in card.eval_results}
    assert card.base_model is None and card.model_name == "my-run (carded)"
    assert scores["shop", "rsum"].metric_value == 90.0
    assert scores["shop", "rsum"].metric_name == "RSUM of 600 (chance 16.5)"
    assert scores["pets", "top1"].metric_value == 50.0 and len(scores) == 8
    params = {"model": "ViT-B-32", "pretrained": "laion2b_s34b_b79k", "name": "yes: a 'name'"}
    params["train_data"] = "a=hf://datasets/me/pairs/{0..3}.tar::b=/secret/b"
    encoders = [
        "timm:vit_base_patch14_dinov2.lvd142m",
        "hf:someone/sentences",
        "/secret/x",
        "x/y/z",
    ]
    first = ModelCard(SPEC, {}, "x", params=params, metrics={"rsum": 1.0}, base_models=encoders)
    (tmp_path / "README.md").write_text(first.text())
    for text in (first.text(), folder_card(tmp_path, SPEC, {}).text()):
        card = HubCard(text).data
        assert card.base_model == [
            "timm/vit_base_patch14_dinov2.lvd142m",
            "someone/sentences",
            "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        ]
        assert card.datasets == ["me/pairs"] and "/secret" not in text
        assert card.model_name.startswith("yes: a 'name'") and len(card.eval_results) == 1
    second = ModelCard(SPEC, {}, "x", base_models=[f"local-dir:{tmp_path}"]).text()
    assert HubCard(second).data.base_model == card.base_model
