"""The recipes' table and their launcher, by the real programs: commands, stopping, killing, continuing, the report."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import open_clip
import pytest
import timm
import torch

from open_clip_zerovl.core.flags import make_parser
from open_clip_zerovl.core.processes import children_of
from scripts.paper import cluster, probe
from scripts.paper import recipes as paper_recipes
from scripts.paper.convert import native_vision_config
from scripts.paper.recipes import (
    FIVE_CAPTIONS,
    RECIPES,
    Hardware,
    batching_of,
    described,
    find_recipe,
    parse_settings,
    probe_line,
    training_flags,
)
from scripts.program import program
from support import ROOT
from support.programs import ForkedTrainings, kill, wait_until
from support.tars import write_source
from support.tiny_clip import NUMBERED, write_bert, write_retrieval_set

PROGRAM = ROOT / "src" / "training" / "main.py"
RECIPES_PROGRAM = [sys.executable, "-m", "scripts.paper.recipes"]
TRAININGS = [name for name, recipe in RECIPES.items() if recipe.program == "training"]
ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if name not in ("DATA", "DRY_RUN", "NODES", "SLURM_JOB_ID")
    },
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def recipes(*arguments: str | Path) -> subprocess.CompletedProcess:
    """The program in this process, for calls that start nothing."""
    words = list(map(str, arguments))
    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, ENVIRONMENT, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        status = program(paper_recipes.start, words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def given(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def shown(*arguments: str | Path) -> tuple[list[str], str]:
    """The command that a dry run without SLURM prints, and the messages beside it."""
    done = recipes(*arguments, "--dry-run", "--no-slurm")
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[1]), done.stderr


def fill(data: Path, *folders: str) -> None:
    """Sources with an empty shard each."""
    for folder in folders:
        (data / folder).mkdir(parents=True)
        (data / folder / "00000.tar").touch()


# ---------------------------------------------------------------------------------------------------------------------
# The command that would be started
# ---------------------------------------------------------------------------------------------------------------------


def test_the_table_covers_the_papers_tables_and_the_page_shows_a_recipe():
    papers = " ".join(recipe.paper for recipe in RECIPES.values())
    tables = [f"Table {number}" for number in range(3, 13)]
    assert all(part in papers for part in (*tables, "A.4", "A.6", "288 px"))
    assert described("train-14m") in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in RECIPES:
        target = re.search(r"make (\S+) DATA=DIR", described(name))
        assert target is not None and find_recipe(target[1]) == name


@pytest.mark.parametrize(
    ("name", "hardware", "expected"),
    [
        ("train-14m", Hardware(8, 31.7), (128, 16)),  # a V100 "with 32 GB": the paper's own numbers
        ("train-14m", Hardware(1, 141), (512, 32)),
        ("train-14m", Hardware(8, 141), (512, 4)),
        ("train-14m", Hardware(8, 79.6), (512, 4)),
        ("train-14m", Hardware(8, 31.7, nodes=2), (128, 8)),
        ("gather", Hardware(8, 31.7), (128, 1)),
        (
            "gather",
            Hardware(8, 79.6),
            (128, 1),
        ),  # a micro-batch of 256 fits, but 128 already fill the batch
        ("batch-8192", Hardware(64, 31.7), (128, 1)),
        ("train-14m", Hardware(0, 0, processes=2), (16, 512)),
    ],
)
def test_micro_batch_and_steps_make_the_effective_batch(name, hardware, expected):
    micro_batch, steps = batching_of(RECIPES[name], hardware, {})
    assert (micro_batch, steps) == expected
    assert micro_batch * steps * hardware.ranks == RECIPES[name].effective_batch


def test_a_run_does_not_start_without_its_data(tmp_path):
    """A dry run says what is missing beside its command."""
    line, said = shown("train-14m", "--gpus", "8", "--gpu-memory", "32", "--data", tmp_path)
    assert line[1] == str(PROGRAM) and line[2:5] == ["--processes", "8", "--"]
    assert (given(line, "--batch-size"), given(line, "--dga-steps")) == ("128", "16")
    assert given(line, "--train-data").split("::")[0] == f"sbu={tmp_path}/sbu"
    mean = line.index("--image-mean")
    assert line[mean + 1 : mean + 5] == ["0.485", "0.456", "0.406", "--image-std"]
    absent = ", ".join(f"{tmp_path}/{source}" for source in ("sbu", "vg", "cc3m", "cc12m"))
    refused = recipes("train-14m", "--no-slurm", "--data", tmp_path)
    assert refused.returncode == 2 and not refused.stdout
    assert all(
        f"{absent} are not there; docs/datasets.md" in text for text in (said, refused.stderr)
    )


def test_the_papers_runs_ask_for_what_the_paper_says(tmp_path):
    """A.9's transform and five captions wherever a set is scored (2.2, Table 2), no TokenDrop in 5.1, all masks drawn again for
    Table 6, the released code's crops."""
    for source in ("coco/test", "f30k/test"):
        (tmp_path / source).mkdir(parents=True)

    def flags(name: str, *settings: str, data: Path = tmp_path) -> dict:
        return training_flags(RECIPES[name], name, data, Hardware(8, 32), parse_settings(settings))

    for name in TRAININGS:
        found = flags(name)
        assert found["retrieval-data"] is not None
        assert [found.get(f"retrieval-{what}") for what in ("transform", "captions")] == (
            ["paper", "5"]
        )
        assert (
            found["image-interpolation"] == "bilinear"
        )  # the release's crops, and those of A.9's evaluation
        assert not any(flag.startswith("retrieval-") for flag in flags(name, "retrieval-data="))
        # One's own sets are scored alike, whether the paper's are there or not.
        mine = [
            flags(name, "retrieval-data=a=/d/a", data=data)
            for data in (tmp_path, tmp_path / "none")
        ]
        assert [one.get("retrieval-transform") for one in mine] == [
            found.get("retrieval-transform")
        ] * 2
    assert flags("train-14m")["token-drop"] == "0.25" and "token-drop" not in flags("train-100m")
    assert "torchcompile" in flags("train-14m") and "torchcompile" not in flags("train-100m")
    flags_of = flags("no-replay")
    assert (flags_of["ablate"], flags_of["dga-retain"]) == ("no-replay", "0")


def test_with_sbatch_the_batch_file_is_submitted(tmp_path):
    """The GPUs of its nodes are given; this machine has none."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    fill(tmp_path, "coco/train", "coco/test")
    command = [*RECIPES_PROGRAM, *f"train-finetune-coco --data {tmp_path} --nodes 2".split()]
    command += ["--sbatch=--partition=gpu", *settings("init-from=a.pt")]
    for more, status in (([], 2), (["--gpus", "8", "--gpu-memory", "32"], 0)):
        assert not (tmp_path / "submitted").exists()
        assert subprocess.run([*command, *more], env=environment).returncode == status
    submitted = (tmp_path / "submitted").read_text().split()
    wanted = {"--nodes=2", "--gres=gpu:8", "--partition=gpu", "--job-name=finetune-coco"}
    assert wanted <= {*submitted}
    own = submitted[submitted.index(str(ROOT / "scripts" / "paper" / "train.sbatch")) :]
    assert own[1:4] == ["--ranks", "8", "--"]
    values = {"--batch-size": "128", "--dga-steps": "1", "--epochs": "1"}
    values |= {"--train-num-samples": str(5000 * 2048), "--retrieval-data": f"coco={tmp_path}/coco"}
    assert {flag: given(own, flag) for flag in values} == values


def test_the_plan_is_the_command_of_the_training(tmp_path):
    line, _ = shown("14m", "--gpus", "8", "--gpu-memory", "32", "--data", tmp_path)
    planned, _ = shown("14m", "--plan", "--gpus", "8", "--gpu-memory", "32", "--data", tmp_path)
    assert planned[: planned.index("--batch-size")][-1] == "plan"
    assert planned[planned.index("--batch-size") :] == line[line.index("--batch-size") :]


def test_the_288_px_model_takes_what_convert_writes():
    """The fine-tuning at 288 px starts from a 224 px ViT of timm, by --init-from of a folder that convert wrote."""
    name = "zerovl-ViT-B-16-288-BERT-base"
    with torch.device("meta"):
        trunk = timm.create_model("vit_base_patch16_224.augreg_in21k", num_classes=0)
    config = open_clip.get_model_config(name)
    assert config["vision_cfg"] == native_vision_config(trunk, 288) and config["embed_dim"] == 512
    for recipe in ("finetune-coco-288", "finetune-f30k-288"):
        assert RECIPES[recipe].flags["model"] == name and "init-from" in RECIPES[recipe].needs


# ---------------------------------------------------------------------------------------------------------------------
# Started
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A DATA folder with all sources and sets of the recipes, small, and a BERT folder."""
    folder = tmp_path_factory.mktemp("recipes")
    write_bert(folder / "bert", words=NUMBERED)
    sources = (
        "sbu",
        "vg",
        "cc3m",
        "cc12m",
        "web",
        "coco/train",
        "f30k/train",
    )
    for number, source in enumerate(sources):
        write_source(folder / "data" / source, 1000 * number, 40, 20)
    for name in ("coco", "f30k"):
        write_retrieval_set(folder / name, [2] * 8)
        for part in (folder / name).iterdir():
            part.rename(folder / "data" / name / part.name)
    return folder


def small(folder: Path, *values: str) -> list[str]:
    """Settings that make a recipe a run of the emoji model with a ViT on the CPU; all its methods stay on."""
    return settings(
        "model=zerovl-emoji-vit", f"text-model={folder / 'bert'}", f"logs={folder / 'logs'}", "pretrained-image=",
        "workers=0", "log-every-n-steps=1", *values,
    )  # fmt: skip


@pytest.mark.slow  # a training of each recipe, two minutes on two cores though they share one start of Python
@pytest.mark.timeout(600)
def test_every_recipe_starts_and_takes_its_steps(workplace):
    data, base = workplace / "data", workplace / "logs" / "train-14m" / "checkpoints" / "epoch_1.pt"
    trainings = ForkedTrainings(ENVIRONMENT)
    try:
        for name in TRAININGS:
            recipe = RECIPES[name]
            if name == "clusters":
                folders = [str(data / "cc12m"), str(data / "cc12m-clusters")]
                words = [str(base), *folders, "--clusters", "3"]
                assert program(cluster.cluster_source, words) == 0
            # One step of each source, and five of those with five captions a picture.
            shares = [5 if source in FIVE_CAPTIONS else 1 for source in recipe.sources]
            steps = max(3, sum(shares))
            values = ["effective-batch=4", f"batch-size={2 if recipe.dga else 4}", "epochs=1"]
            values += [f"train-num-samples={4 * steps}"]
            values += [f"{need}={base}" for need in recipe.needs]
            line, said = shown(name, "--gpus", "0", "--data", data, *small(workplace, *values))
            assert line[1] == str(PROGRAM) and "missing" not in said
            answer, printed = trainings(line[2:], workplace / f"{name}.txt")
            assert answer["statuses"] == [0], f"{name}: {answer}\n{printed[-3000:]}"
            words = (workplace / "logs" / name / "out.log").read_text()
            assert (
                words.count("Train Epoch: 0 [") == steps and f" {steps} steps of 4 samples" in words
            ), name
            assert "rsum" in words  # of the sets under DATA
    finally:
        trainings.close()


def test_a_probe_of_a_dataset_names_it_for_both_parts(tmp_path):
    """Every probe's line is one that the program takes."""
    probes = {name: each for name, each in RECIPES.items() if each.program == "linear-probe"}
    for name, recipe in probes.items():
        line = probe_line(recipe, name, tmp_path, Hardware(8, 32), {"model": "M"})
        make_parser(probe.probe, "probe").parse_args(line[3:])
        if name == "linear-probe-cub":
            assert given(line, "--train") == given(line, "--test") == f"cub:{tmp_path}/cub"
            assert [given(line, flag) for flag in ("--batch-size", "--lr")] == ["512", "6.4"]
            assert "--amp" in line


def start(command: list[str | Path], log: Path) -> subprocess.Popen:
    with open(log, "a") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)


SLOW_TO_WRITE = """
import time
import torch.serialization
write = torch.serialization.save
def slow(*arguments, **options):
    time.sleep(34)
    write(*arguments, **options)
torch.serialization.save = slow
from training.main import run_as_program
run_as_program()
"""


@pytest.mark.slow  # a checkpoint that takes longer to write than torchrun leaves the ranks after the first has ended
@pytest.mark.timeout(300)
def test_ranks_without_a_checkpoint_to_write_wait_for_the_one_that_writes(workplace, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_WRITE)
    values = small(
        workplace,
        "name=slow",
        "effective-batch=8",
        "batch-size=4",
        "retrieval-data=",
        "save-every-steps=",
    )
    line, _ = shown("clip", "--gpus", "0", "--data", workplace / "data", *values)
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 --".split()
    )
    log, folder = tmp_path / "log", workplace / "logs" / "slow"
    run = start([*torchrun, tmp_path / "slow.py", *line[2:]], log)
    try:
        printed = folder / "out.log"
        wait_until(lambda: printed.exists() and "Train Epoch" in printed.read_text(), run, log)
        for rank in children_of(run.pid):
            os.kill(rank, signal.SIGUSR1)
        run.wait(timeout=120)
    finally:
        kill(run)
    assert (
        len(list((folder / "checkpoints").glob("step_*.pt"))) == 1 and (folder / "requeue").exists()
    )
