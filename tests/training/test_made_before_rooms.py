"""Files on disk outlive the layout of the package: what the commit before the move into subpackages (ae9f5b3) wrote is read.

The archive holds a stopped run, a cache of frozen features, a clustering and an export. `make_made_before_rooms.py` beside it
wrote it and says what is where. Only entry points that a user has are taken here: the training program, `zerovl`,
`load_model`, open_clip.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from open_clip_zerovl.checkpoints import load_model
from support import ROOT, warm

ARCHIVE = ROOT / "tests" / "fixtures" / "made_before_rooms.tar.gz"
EPOCH_1 = "logs/run/checkpoints/epoch_1.pt"
CAPTIONS = ["a red cat", "the big house with 3 of 4"]


# A command by name: what it starts, in a copy of the archive of its own. STOCK knows nothing of this package.
STOCK = """
import sys, open_clip, torch
from PIL import Image
model, _, preprocess = open_clip.create_model_and_transforms("local-dir:" + sys.argv[1])
tokens = open_clip.get_tokenizer("local-dir:" + sys.argv[1])(sys.argv[2:])
model.eval()
with torch.no_grad():
    found = {"image": model.encode_image(preprocess(Image.open("picture.png"))[None]), "text": model.encode_text(tokens)}
torch.save({"weights": model.state_dict(), **found}, "stock.pt")
assert not any(name.partition(".")[0] in ("open_clip_zerovl", "training") for name in sys.modules)
"""


def commands_of(manifest: dict) -> dict[str, list[str]]:
    training, zerovl = ["-m", "training.main"], ["-m", "open_clip_zerovl.cli"]
    return {
        "resumed": [*training, *manifest["run"], "--resume", "latest"],
        "from-epoch": [*training, *manifest["run"], "--resume", "latest"],
        "cached": [*training, *manifest["frozen"], "--name", "frozen", "--cache-frozen", "cache"],
        "cached-anew": [*training, *manifest["frozen"], "--name", "frozen", "--cache-frozen", "new"],
        "clusters": [*training, *manifest["clusters"], "--name", "clusters"],
        "export": [*zerovl, "export", EPOCH_1, "again"],
        "stock": ["-c", STOCK, "exported", *CAPTIONS],
    }


def prepare(name: str, folder: Path) -> None:
    """What a command's copy of the archive has that the archive has not."""
    if name == "from-epoch":  # as the refusal of the step checkpoint says
        (step,) = (folder / "logs/run/checkpoints").glob("step_*.pt")
        step.unlink()
    if name == "cached":  # features that nobody computed
        for features in (folder / "cache").glob("*.features"):
            features.write_bytes(bytes(features.stat().st_size))
    if name == "stock":  # the folder has moved: the lines that `zerovl export` says have to be set
        config_file = folder / "exported" / "open_clip_config.json"
        config = json.loads(config_file.read_text())
        config["model_cfg"]["text_cfg"].update(hf_model_name="exported", hf_tokenizer_name="exported")
        config_file.write_text(json.dumps(config))
        pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "picture.png")


@dataclass
class Ended:
    """A command that has ended: where it ran, and what it said.

    Attributes:
        before: modification time and content of the files of its folder before it began.
    """

    folder: Path
    before: dict[str, tuple[int, bytes]]
    status: int
    output: str


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The unpacked archive; its files name each other by paths relative to it."""
    return unpacked(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory, place) -> Callable[[str], Ended]:
    """Each command's end; two run at a time."""
    commands = commands_of(manifest_of(place))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

    def run(name: str) -> Ended:
        folder = unpacked(tmp_path_factory.mktemp(name))
        prepare(name, folder)
        before = marks_of(folder)
        done = subprocess.run(
            [warm.python(), *commands[name]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Ended(folder, before, done.returncode, done.stdout)

    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(commands, pool.map(run, commands), strict=True))

    def get(name: str) -> Ended:
        assert runs[name].status == (2 if name == "resumed" else 0), runs[name].output[-3000:]
        return runs[name]

    return get


def unpacked(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return folder


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def weights_hash(state: dict[str, torch.Tensor]) -> str:
    """As `make_fixture.weights_hash`."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"Contrastive_loss: (\S+)", output)]


def marks_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of each file: one that was written anew shows."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys() and len(first) > 30
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_the_step_checkpoint_is_refused_and_the_epochs_goes_on(place, ended):
    """Seeds gave other batches then: an epoch that was begun with those ends in a sentence, before anything is touched."""
    resumed = ended("resumed")
    (step,) = (place / "logs/run/checkpoints").glob("step_*.pt")
    assert re.search(r"after step \d+ of epoch 1 by an earlier release.*from epoch_1\.pt", resumed.output)
    assert "Traceback" not in resumed.output and "Train Epoch" not in resumed.output
    names = [str(file.relative_to(place)) for file in (step, place / EPOCH_1)]
    after = marks_of(resumed.folder)
    assert all(after[name] == resumed.before[name] for name in names)

    again = ended("from-epoch")
    trained = re.findall(r"Train Epoch: (\d+) \[ *(\d+)/40 ", again.output)
    assert trained == [("1", str(4 * number)) for number in range(1, 11)]  # the second epoch as a whole
    first, second = state_of(place / EPOCH_1), state_of(again.folder / "logs/run/checkpoints/epoch_2.pt")
    assert first.keys() == second.keys() and not torch.equal(first["visual.proj"], second["visual.proj"])


def test_the_epoch_checkpoint_and_the_export_load(place, ended, monkeypatch):
    """load_model, `zerovl export`, and the exported folder in open_clip without us: the same weights and embeddings."""
    weights = state_of(place / EPOCH_1)
    stock, again = ended("stock"), ended("export").folder / "again"
    monkeypatch.chdir(stock.folder)
    model, preprocess, tokenizer = load_model(EPOCH_1)
    created, _, _ = open_clip.create_model_and_transforms(f"local-dir:{again}")
    found = torch.load("stock.pt", weights_only=True)
    for state in (model.state_dict(), created.state_dict(), found["weights"]):
        assert_same_tensors(state, weights)
    for folder in (again, place / "exported"):
        assert_same_tensors(load_file(folder / "open_clip_model.safetensors"), weights)
    texts = [(folder / "open_clip_config.json").read_text() for folder in (again, place / "exported")]
    assert len({re.sub(r'(?m)(hf_\w+_name": )"/.*"', r"\1", text) for text in texts}) == 1
    with torch.no_grad():
        image = preprocess(Image.open("picture.png"))[None]
        torch.testing.assert_close(model.eval().encode_image(image), found["image"])
        torch.testing.assert_close(model.encode_text(tokenizer(CAPTIONS)), found["text"])


def test_the_cache_of_frozen_features_is_taken(place, ended):
    """It is what a run writes now; and rows that nobody computed are read from it, hence it is not made anew.

    Those rows are zeros: each logit is 0, and the loss of 4 pairs ln 4. Without that cache the losses are others.
    """
    zeros, anew = ended("cached"), ended("cached-anew")
    assert "made anew" not in zeros.output
    assert losses_of(zeros.output) == pytest.approx([math.log(4)] * 10, abs=1e-4)
    assert len(losses_of(anew.output)) == 10
    assert max(abs(loss - math.log(4)) for loss in losses_of(anew.output)) > 1e-2
    names = [name for name in zeros.before if name.startswith("cache/")]
    after = marks_of(zeros.folder)
    assert len(names) == 6 and all(after[name][1] == zeros.before[name][1] for name in names)
    assert after["cache/cache.json"] == zeros.before["cache/cache.json"]  # nor written again with the same content

    assert (anew.folder / "new/cache.json").read_bytes() == (place / "cache/cache.json").read_bytes()
    for index in range(2):
        old = np.fromfile(place / f"cache/{index}.features", np.float32)
        new = np.fromfile(anew.folder / f"new/{index}.features", np.float32)
        filled = np.fromfile(anew.folder / f"new/{index}.filled", np.bool_).repeat(8)
        assert filled.any() and old.all()
        np.testing.assert_allclose(new[filled], old[filled], rtol=1e-4, atol=1e-6)


def test_the_clustering_trains(place, ended):
    """The clusters as sources, out of the tars where they lie now, by the indexes that lay beside them."""
    run = ended("clusters")
    counts = json.loads((place / "clusters/report.json").read_text())["counts"]
    assert len(counts) == 2 and sum(counts) == 24
    log = (run.folder / "logs/clusters/out.log").read_text()
    for number, count in enumerate(counts):
        assert f"c-{number:03d}: {count // 4 * 4} of {count} samples in " in log
    losses = losses_of(run.output)
    assert len(losses) == sum(count // 4 for count in counts) and all(map(math.isfinite, losses))
    assert weights_hash(state_of(run.folder / "logs/clusters/checkpoints/epoch_1.pt"))
    after = marks_of(run.folder)
    kept = [name for name in run.before if ".zerovl-index" in name or name.startswith("clusters/")]
    assert len(kept) >= 8 and all(after[name] == run.before[name] for name in kept)
