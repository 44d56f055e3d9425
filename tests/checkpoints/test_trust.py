"""No code that comes with a model runs; a folder or file that is not a model is refused with a sentence."""

import json
import pickle
import sys

import numpy as np
import open_clip
import pytest
import torch
import transformers

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.weights import load_pickled, read_state_dict
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.models.configs import LOCAL_DIR
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_retrieval_set,
    write_run,
)

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import BertTokenizer as Mine
"""

ASKS = pytest.mark.skipif(
    transformers.__version__.startswith("4."),
    reason="transformers 4 asks for code that it does not need; it is refused",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    home = tmp_path_factory.mktemp("trust")
    name = register(
        home / "configs", "trust-bert", NATIVE_VISION, bert_text(write_bert(home / "bert"))
    )
    return export_local_dir(
        write_run(home / "run", random_model(name), {"model": name}), home / "exported"
    )


def with_code(folder, marker):
    """Give an exported folder a Python file that touches `marker`, a tokenizer that names it, and a config that allows it."""
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Mine", None]}, "tokenizer_class": "Mine"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "open_clip_config.json").read_text())
    text_cfg = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder)}
    config["model_cfg"]["text_cfg"] |= {**text_cfg, "tokenizer_kwargs": {"trust_remote_code": True}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def evil(exported, tmp_path, monkeypatch):
    """(the folder, the file that its code would make)."""
    import shutil

    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # transformers marks the class that it has loaded so, for the rest of the process.
    monkeypatch.setattr(transformers.BertTokenizer, "_auto_class", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    return with_code(
        shutil.copytree(exported, tmp_path / "evil"), tmp_path / "ran"
    ), tmp_path / "ran"


@pytest.mark.line("3.3", reason="open_clip 4 passes over a folder's own trust_remote_code")
def test_open_clip_alone_runs_what_the_folder_brings(evil):
    folder, marker = evil
    open_clip.get_tokenizer(LOCAL_DIR + str(folder))
    assert marker.exists()  # or the tests below could not fail


@pytest.mark.line("4", reason="open_clip 3.3 does as the folder says")
def test_open_clip_4_passes_over_what_the_folder_allows_itself(evil):
    folder, marker = evil
    open_clip.get_tokenizer(LOCAL_DIR + str(folder))
    assert not marker.exists()
    transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists()  # or the tests below could not fail


def test_an_exported_folder_runs_nothing(evil, tmp_path, capsys):
    """On 3.3 it is refused; on 4 transformers takes its own class of the name that the folder gives, and asks nobody."""
    folder, marker = evil
    write_retrieval_set(tmp_path / "set", [1, 1])
    status = main(["retrieval", str(folder), "--data", str(tmp_path / "set")])
    assert not marker.exists()
    assert status == 0 or "wants to run Python code" in capsys.readouterr().err
    assert status == (2 if open_clip.__version__.startswith("3.") else 0)


@ASKS
def test_code_that_a_folder_names_and_does_not_need_is_passed_over_without_a_question(evil):
    folder, marker = evil
    config = json.loads((folder / "open_clip_config.json").read_text())
    del config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    load_model(folder)
    assert not marker.exists()


@ASKS
def test_export_of_a_run_on_such_a_folder_runs_nothing_and_hands_no_permission_on(evil, tmp_path):
    folder, marker = evil
    run = write_run(
        tmp_path / "run", random_model("trust-bert"), {"model": LOCAL_DIR + str(folder)}
    )
    out = export_local_dir(run, tmp_path / "out")
    open_clip.get_tokenizer(LOCAL_DIR + str(out))
    assert (
        not marker.exists()
        and "trust_remote_code" not in (out / "open_clip_config.json").read_text()
    )


def test_the_text_towers_own_code_does_not_run(exported, tmp_path, evil):
    folder, marker = evil
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "evil.Mine"}, "model_type": "mine"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="wants to run Python code|holds a model of type"):
        create_model_and_transforms(LOCAL_DIR + str(folder))
    assert not marker.exists()


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    torch.save({"state_dict": {"a": Evil()}}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(UserError, match="cannot be read"):
            load_model(tmp_path / name, model_name="trust-bert")
    command = ["export", str(tmp_path / "evil.pt"), str(tmp_path / "out"), "--model", "trust-bert"]
    assert main(command) == 2
    assert "Unsupported global" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_numbers_of_numpy_are_read(tmp_path):
    """open_clip before 3 wrote an epoch so."""
    file = tmp_path / "new.pt"
    for kind in (np.int64, np.float32, np.float64, np.bool_):
        torch.save({"epoch": kind(1), "state_dict": {"w": torch.ones(2)}}, file)
        assert load_pickled(file)["epoch"] == 1 and read_state_dict(file)["w"].sum() == 2
