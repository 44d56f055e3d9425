"""On a GPU: a training resumed in the middle of an epoch ends with the weights of one never interrupted."""

from __future__ import annotations

import json
import shutil

import pytest

from support.programs import COMMON, flat_tensors, launch, state_of
from support.tars import write_source
from support.tiny_clip import NATIVE_VISION, NUMBERED, bert_text, write_bert

pytestmark = pytest.mark.gpu
EPOCHS = 2


@pytest.mark.timeout(600)
def test_resumed_equals_never_interrupted(device, tmp_path, monkeypatch):
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # for deterministic algorithms, which the script asks for
    bert = write_bert(tmp_path / "bert", words=NUMBERED)
    config = {
        "embed_dim": 24,
        "vision_cfg": {**NATIVE_VISION, "patch_dropout": 0.25},
        "text_cfg": bert_text(bert),
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    data = "::".join(
        f"{name}={write_source(tmp_path / name, first, 64, 16)}"
        for name, first in (("a", 0), ("b", 500))
    )
    arguments = [
        *COMMON, "--device", device.type, "--train-data", data, "--debiased-sampling", "--batch-size", "4",
        "--dga-steps", "2", "--epochs", str(EPOCHS), "--save-every-steps", "6", "--keep-checkpoints", "9",
        "--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--workers", "1",
    ]  # fmt: skip
    done = launch("ours", tmp_path / "tiny.json", [*arguments, "--name", "whole"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, again = (tmp_path / "logs" / name for name in ("whole", "again"))
    shutil.copytree(whole, again)
    middle = sorted((whole / "checkpoints").glob("step_0000_*.pt"))[0]
    for checkpoint in (again / "checkpoints").iterdir():
        if checkpoint.name != middle.name:
            checkpoint.unlink()
    resumed = [*arguments, "--name", "again", "--resume", "latest"]
    done = launch("ours", tmp_path / "tiny.json", resumed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (
        flat_tensors(state_of(tmp_path, name, EPOCHS)["state_dict"]) for name in ("whole", "again")
    )
    assert first.keys() == second.keys()
    for (
        name,
        tensor,
    ) in first.items():  # bit for bit on the CPU; on a GPU sums may be taken in another order
        assert (
            tensor.double() - second[name].double()
        ).norm() <= 1e-4 * tensor.double().norm() + 1e-12, name
