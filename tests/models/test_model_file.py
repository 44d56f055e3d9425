"""`--model-config FILE.json`: one's own model in training, plan, evaluation and export."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY, load_model
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.configs import register_model_file
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, write_run
from training.params import parse

CONFIG = {
    "embed_dim": 24,
    "vision_cfg": NATIVE_VISION,
    "text_cfg": {**CLIP_TEXT, "vocab_size": 49408},
}
TEXTS = torch.arange(1, 33).reshape(2, 16)


def write(file: Path, config: object = CONFIG) -> Path:
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def with_config(checkpoint: Path, config: dict) -> Path:
    """Write the entry by which training keeps the config in a checkpoint."""
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, MODEL_ENTRY: config}, checkpoint)
    return checkpoint


def test_training_takes_the_file_in_place_of_a_name(tmp_path, monkeypatch):
    write(tmp_path / "own-training.json")
    monkeypatch.chdir(tmp_path)
    args, config = parse(["--model-config", "own-training.json", "--train-data", "a=/nowhere"])
    assert args.model == "own-training" and config.model_config == args.model_config == str(
        tmp_path / "own-training.json"
    )
    words = ["--model", "ViT-B-32", "--model-config", "own-training.json", "--train-data", "a=/x"]
    with pytest.raises(UserError, match="--model ViT-B-32 and --model-config .* are two models"):
        parse(words)


def test_evaluation_and_export_find_the_runs_config_or_take_a_file(tmp_path, capsys):
    """As in another process: the name is not registered there."""
    file = write(tmp_path / "own-run.json")
    register_model_file(file)
    model = random_model("own-run")
    run = {"model": "own-found", "model_config": file.with_name("own-found.json")}
    checkpoint = write_run(tmp_path / "run", model, run)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "knows no model 'own-found'" in capsys.readouterr().err
    write(tmp_path / "own-given.json")
    given = ["--model", str(tmp_path / "own-given.json")]
    assert main(["export", str(checkpoint), str(tmp_path / "given"), *given]) == 0
    with_config(checkpoint, CONFIG)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    held = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    assert held["vision_cfg"]["width"] == NATIVE_VISION["width"]
    for source in (tmp_path / "given", tmp_path / "out", checkpoint):
        assert torch.equal(load_model(source)[0].visual.proj, model.visual.proj)


def test_two_runs_whose_files_have_one_name_keep_their_own_models(tmp_path):
    """In one process, as for `zerovl compare`: both fit the same tensors, and differ in their heads."""
    other = deepcopy(CONFIG)
    other["text_cfg"]["heads"] *= 2
    checkpoints, wanted = [], []
    for name, config in (("a", CONFIG), ("b", other)):
        model = random_model(register_model_file(write(tmp_path / f"heads-{name}.json", config)))
        params = {"model": "heads", "model_config": "heads.json"}
        checkpoints.append(with_config(write_run(tmp_path / name, model, params), config))
        wanted.append(model.eval().encode_text(TEXTS))
    for checkpoint, embeddings in zip(
        [*checkpoints, checkpoints[0]], [*wanted, wanted[0]], strict=True
    ):
        assert torch.equal(load_model(checkpoint)[0].encode_text(TEXTS), embeddings)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("bad-empty.json", {}, "needs embed_dim, vision_cfg and text_cfg"),
        ("ViT-B-32.json", CONFIG, "there is another model called ViT-B-32"),
    ],
)
def test_a_file_that_is_not_a_model_gives_a_sentence(tmp_path, name, config, words):
    with pytest.raises(UserError, match=words) as caught:
        register_model_file(write(tmp_path / name, config))
    assert "\n" not in str(caught.value)
