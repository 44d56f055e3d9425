"""Folders that were moved load: in this package as they are, in stock open_clip after `export --here`, in transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from transformers import AutoConfig, AutoModel, AutoTokenizer, BitImageProcessor, Dinov2Config

import open_clip_zerovl.api as zerovl
from open_clip_zerovl.checkpoints.card import MOVED
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import _for_repository, export_local_dir, loading_notes
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.transformers_folder import export_transformers
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.curve import open_ends, write_between
from open_clip_zerovl.models.build import create_model_and_transforms
from support import warm
from support.tars import write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    bert_text,
    picture,
    random_model,
    register,
    write_bert,
    write_run,
)

TEXT = "a red cat"
STRANGER = """
import json, os, sys
import open_clip, torch
from transformers import AutoModel, AutoTokenizer
found = {}
for folder in sys.argv[1:]:
    if os.path.isfile(folder + "/open_clip_config.json"):
        model = open_clip.create_model_and_transforms("local-dir:" + folder)[0].eval()
        tokens = open_clip.get_tokenizer("local-dir:" + folder)([TEXT])
        with torch.no_grad():
            found[folder] = model.encode_text(tokens, normalize=True)[0].tolist()
    else:
        tokens = AutoTokenizer.from_pretrained(folder)([TEXT], return_tensors="pt")
        with torch.no_grad():
            model = AutoModel.from_pretrained(folder).eval()
            features = model.text_projection(model.text_model(**tokens).pooler_output)
            found[folder] = torch.nn.functional.normalize(features, dim=-1)[0].tolist()
assert not any(name.startswith("open_clip_zerovl") for name in sys.modules)
print(json.dumps(found))
""".replace("TEXT", repr(TEXT))
OPEN_CLIP = ("clip", "bert", "between", "aligned")
TRANSFORMERS = ("dual", "aligned-dual")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Six folders below `made`: of open_clip's own towers, BERT, one between two, two of `align`, and one for transformers."""
    home = tmp_path_factory.mktemp("moves")
    bert = write_bert(home / "bert")
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.from_pretrained(bert)).save_pretrained(bert)
    register(home / "configs", "moved-clip", NATIVE_VISION, CLIP_TEXT)
    register(home / "configs", "moved-bert", NATIVE_VISION, bert_text(bert))
    runs = {
        name: write_run(home / name, random_model(f"moved-{name}"), {"model": f"moved-{name}"})
        for name in ("clip", "bert")
    }
    made = home / "made"
    for name, run in runs.items():
        export_local_dir(run, made / name)
    export_transformers(runs["bert"], made / "dual")
    end = Encoder(str(made / "bert"), device="cpu")
    write_between(open_ends(end, end), 0.5, made / "between")
    save_for_hf(timm.create_model("test_vit.r160_in1k", pretrained=False), home / "timm")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = Dinov2Config(mlp_ratio=2, image_size=40, patch_size=8, **small)
    AutoModel.from_config(vision).save_pretrained(home / "dinov2")
    crop = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    BitImageProcessor(**crop).save_pretrained(home / "dinov2")
    rng = np.random.default_rng(0)
    members = [
        (f"{number}.{ending}", content)
        for number in range(40)
        for ending, content in (("png", picture(rng)), ("txt", f"a {number} cat".encode()))
    ]
    write_tar(home / "pairs" / "0.tar", members)
    for name, image in (
        ("aligned", f"timm:{home / 'timm'}"),
        ("aligned-dual", f"hf:{home / 'dinov2'}"),
    ):
        aligned = zerovl.align(
            image=image,
            text=f"hf:{bert}",
            data=f"p={home / 'pairs'}",
            out=home / f"{name}-out",
            embed_dim=8,
            epochs=1,
            batch_size=16,
            device="cpu",
        )
        shutil.move(os.fspath(aligned), made / name)
    return home


def embedding(folder: Path) -> torch.Tensor:
    model, _, tokenizer = load_model(folder)
    with torch.no_grad():
        return model.encode_text(tokenizer([TEXT]), normalize=True)[0]


def dual_embedding(folder: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)([TEXT], return_tensors="pt")
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder).eval()
        features = model.text_projection(model.text_model(**tokens).pooler_output)
    return torch.nn.functional.normalize(features, dim=-1)[0]


def seen_by_a_stranger(folders: list[Path], tmp_path: Path) -> dict[str, list[float]]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        [warm.python(), "-c", STRANGER, *map(str, folders)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {Path(name).name: content for name, content in found.items()}


def test_six_kinds_of_folders_load_after_a_move(home, tmp_path, capsys):
    expected = {name: embedding(home / "made" / name) for name in OPEN_CLIP}
    before = {name: dual_embedding(home / "made" / name) for name in TRANSFORMERS}
    moved = Path(shutil.move(home / "made", tmp_path / "moved"))
    for name in OPEN_CLIP:  # this package needs nothing
        assert torch.equal(embedding(moved / name), expected[name]), name
    created = create_model_and_transforms(f"local-dir:{moved / 'bert'}")[0]  # as training does
    assert created.text.config.hidden_size == 32
    with pytest.raises(OSError, match="made/bert"):  # negative control
        open_clip.create_model_and_transforms(f"local-dir:{moved / 'bert'}")
    for name in OPEN_CLIP:
        assert main(["export", str(moved / name), "--here"]) == 0
    out = capsys.readouterr().out
    assert out.count("Its new path is written") == 3 and out.count("Nothing had to be changed") == 1
    folders = [moved / name for name in OPEN_CLIP + TRANSFORMERS]
    found = seen_by_a_stranger(folders, tmp_path)
    for name in OPEN_CLIP:
        assert torch.allclose(torch.tensor(found[name]), expected[name], rtol=0, atol=1e-6), name
    for name in TRANSFORMERS:
        assert torch.allclose(torch.tensor(found[name]), before[name], rtol=0, atol=1e-6), name
    shutil.move(moved, home / "made")


def test_the_card_and_the_last_line_name_the_command(home):
    card = (home / "made" / "bert" / "README.md").read_text()
    assert MOVED in card and "export FOLDER --here" in loading_notes(home / "made" / "bert")[0]
    assert MOVED not in (home / "made" / "clip" / "README.md").read_text()
    assert b"--here" not in _for_repository(home / "made" / "bert", "me/it")["README.md"]


def test_a_folder_that_lost_its_towers_config_is_refused(home, tmp_path):
    folder = Path(shutil.copytree(home / "made" / "bert", tmp_path / "bert"))
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_model_name"] = str(tmp_path / "gone")
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config.json of its text tower, which is not in"):
        load_model(folder)


def test_export_without_a_folder_to_write_is_refused(capsys):
    assert main(["export", "x.pt"]) == 2
    assert "a folder to write is missing" in capsys.readouterr().err
