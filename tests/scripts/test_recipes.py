"""The recipes' table and their launcher, by the real programs: what they start, stopping, killing, going on, the report."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import open_clip
import pytest
import timm
import torch

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.layouts import as_native_vit, native_vision_config, resample_positions
from open_clip_zerovl.cli.program import main as zerovl_main
from open_clip_zerovl.core.processes import children_of
from open_clip_zerovl.models.build import with_text_model
from scripts.paper import finetune_report
from scripts.paper import recipes as paper_recipes
from scripts.paper.finetune_report import Comparison
from scripts.paper.launch import Node, command_line, run_folder
from scripts.paper.recipes import (
    Hardware,
    batching_of,
    cores_of_a_node,
    crowded,
    missing_for,
    parse_settings,
    plan_line,
    probe_line,
    training_flags,
)
from scripts.paper.table import (
    RECIPES,
    described,
    find_recipe,
)
from support import ROOT, warm
from support.programs import ForkedTrainings
from support.reinforced import members_of
from support.tars import png, write_source, write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    WORDS,
    bert_text,
    random_model,
    register,
    write_bert,
    write_retrieval_set,
    write_run,
)

RECIPES_PROGRAM = [sys.executable, "-m", "scripts.paper.recipes"]
TRAININGS = [name for name, recipe in RECIPES.items() if recipe.program == "training"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("DATA", "DRY_RUN", "NODES", "SLURM_JOB_ID")},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def recipes(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    command = [*RECIPES_PROGRAM, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, **options)


def zerovl(*arguments: str | Path) -> None:
    command = [warm.python(), "-m", "open_clip_zerovl.cli", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def given(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


# ---------------------------------------------------------------------------------------------------------------------
# What would be started
# ---------------------------------------------------------------------------------------------------------------------


def test_the_table_covers_the_papers_tables_and_each_recipe_says_what_it_is():
    papers = " ".join(recipe.paper for recipe in RECIPES.values())
    assert all(part in papers for part in (*(f"Table {n}" for n in range(3, 13)), "A.4", "A.5", "A.6", "288 px"))
    for name, recipe in RECIPES.items():
        text = described(name)
        assert all(f"\n  {key} " in text for key in ("paper", "metric", "hardware", "time", "data", "batch", "command"))
        assert recipe.result in text and f"{recipe.effective_batch:,}" in text
        target = re.search(r"make (\S+) DATA=DIR", text)
        assert target is not None and find_recipe(target[1]) == name
    listed = recipes("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(RECIPES)


@pytest.mark.parametrize(
    ("name", "hardware", "expected"),
    [
        ("train-14m", Hardware(8, 31.7), (128, 16)),  # a V100 "with 32 GB": the paper's own numbers
        ("train-14m", Hardware(1, 141), (512, 32)),
        ("train-14m", Hardware(8, 141), (128, 16)),  # all graphs but one are kept: 1.021, where 512 x 4 gives 1.083
        ("train-14m", Hardware(8, 79.6), (512, 4)),
        ("train-14m", Hardware(8, 31.7, nodes=2), (128, 8)),
        ("gather", Hardware(8, 31.7), (128, 1)),
        ("gather", Hardware(8, 79.6), (128, 1)),  # a micro-batch of 256 fits, but 128 already fill the batch
        ("batch-8192", Hardware(64, 31.7), (128, 1)),
        ("train-14m", Hardware(0, 0, processes=2), (16, 512)),
        ("distill-14m", Hardware(1, 31.7), (128, 128)),
        ("datacompdr-12m", Hardware(1, 79.6), (256, 32)),
        ("datacompdr-12m", Hardware(8, 79.6), (128, 8)),  # 5 graphs kept: 1.125, where 256 x 4 with 2 gives 1.167
    ],
)
def test_micro_batch_and_steps_make_the_effective_batch(name, hardware, expected):
    micro_batch, steps = batching_of(RECIPES[name], hardware, {})
    assert (micro_batch, steps) == expected
    assert micro_batch * steps * hardware.ranks == RECIPES[name].effective_batch


def test_a_batch_that_does_not_divide_is_said_and_one_without_dga_refused(capsys):
    assert batching_of(RECIPES["gather"], Hardware(3, 32), {}) == (128, 3)
    assert "effective batch is 1152 instead of 1024 (3 ranks x 128 x 3)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="needs 128 GPUs of this size, but there are 8: take dga-8 or dga-16"):
        batching_of(RECIPES["batch-16384"], Hardware(8, 32), {})


def test_a_dry_run_prints_the_command_and_what_is_missing(tmp_path):
    done = recipes("train-14m", "--dry-run", "--no-slurm", "--gpus", "8", "--gpu-memory", "32", "--data", tmp_path)
    line = shlex.split(done.stdout.splitlines()[1])
    assert done.returncode == 0 and "--nproc-per-node=8" in line and line[line.index("--") - 1] == "training.main"
    assert (given(line, "--batch-size"), given(line, "--dga-steps")) == ("128", "16")
    assert given(line, "--train-data").split("::")[0] == f"sbu={tmp_path}/sbu"
    assert line[line.index("--image-mean") + 1 : line.index("--image-std")] == ["0.485", "0.456", "0.406"]
    absent = ", ".join(f"{tmp_path}/{source}" for source in ("sbu", "vg", "cc3m", "cc12m"))
    assert f"missing: {absent} are not there; docs/datasets.md" in done.stderr
    started = recipes("train-14m", "--no-slurm", "--data", tmp_path)
    assert started.returncode == 1 and f"{absent} are not there" in started.stderr and not started.stdout


def test_empty_source_folders_are_told(tmp_path):
    for source in ("sbu", "vg", "cc3m", "cc12m"):
        (tmp_path / source).mkdir()
        (tmp_path / source / "00000.tar").touch()
    assert missing_for(RECIPES["train-14m"], tmp_path, {}) is None
    (tmp_path / "vg" / "00000.tar").unlink()
    assert missing_for(RECIPES["train-14m"], tmp_path, {}).startswith(f"{tmp_path}/vg holds no data; docs/datasets.md")


def test_a_plan_without_data_or_gpu_is_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_recipes, "find_gpus", lambda: (0, 0.0))
    monkeypatch.setattr(paper_recipes, "run_line", lambda *_, **__: pytest.fail("measures on the CPU"))
    monkeypatch.setattr(sys, "argv", ["recipes.py", "14m", "--plan", "--data", str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"cc12m are not there.*no GPU to measure either: plan for one with ASSUME=v100:8"
    ):
        paper_recipes.main()


def test_more_loader_processes_than_cores_are_told():
    eight = Hardware(8, 32)
    assert crowded(eight, {"workers": "2"}, 16) is None
    assert crowded(eight, {"workers": "8"}, 16) == (
        "8 ranks x 8 workers are 64 loader processes on 16 CPU cores of a node: --set workers=2, or on SLURM "
        "--sbatch=--cpus-per-task=64"
    )
    asked = argparse.Namespace(sbatch=["--partition=gpu", "--cpus-per-task=96"])
    assert cores_of_a_node(asked, slurm=True) == 96
    assert cores_of_a_node(argparse.Namespace(sbatch=[]), slurm=True) == 16  # train.sbatch's own


def test_a_dry_run_on_several_nodes_needs_no_sbatch(tmp_path):
    done = recipes("14m", "--dry-run", "--nodes", "2", "--gpus", "8", "--gpu-memory", "32", "--data", tmp_path)
    assert done.returncode == 0 and shlex.split(done.stdout.splitlines()[1])[:2] == ["sbatch", "--nodes=2"]
    assert "are 64 loader processes on 16 CPU cores" in done.stderr
    here = recipes("14m", "--dry-run", "--nodes", "2", "--no-slurm", "--gpus", "8", "--data", tmp_path)
    assert here.returncode == 1 and "--nodes 2 needs SLURM" in here.stderr


@pytest.mark.parametrize(
    ("arguments", "paper", "caption"),
    [
        ([], False, "transform: the checkpoint's own"),
        (["--transform", "paper"], True, "transform: squash 256"),
        (["--recipe", "finetune-coco"], True, "transform: squash 256"),
        (["--recipe", "finetune-coco", "--transform", "checkpoint"], False, "transform: the checkpoint's own"),
    ],
)
def test_a_finetunings_table_takes_the_checkpoints_own_transform(
    tmp_path, monkeypatch, capsys, arguments, paper, caption
):
    (tmp_path / "checkpoints").mkdir()
    torch.save({"epoch": 1}, tmp_path / "checkpoints" / "epoch_1.pt")
    (tmp_path / "params.txt").write_text("init_from: before.pt\nretrieval_data: coco=/coco\n")
    asked = []

    def scored(encoder, data, settings):
        asked.append(settings.paper_transform)
        return {"coco": {"images": 5, "captions": 25, "rsum": 400.0}}

    monkeypatch.setattr(finetune_report, "run_retrieval", scored)
    monkeypatch.setattr(sys, "argv", ["finetune_report", str(tmp_path), *arguments])
    assert finetune_report.main() == 0
    assert (
        asked == [paper, paper]
        and caption in capsys.readouterr().out
        and caption in (tmp_path / "finetune.md").read_text()
    )


def test_settings_set_replace_and_leave_out_flags(tmp_path):
    changed = settings("lr=3e-4", "pretrained-image=", "lock-text", "name=other")
    done = recipes("clip", "--dry-run", "--no-slurm", "--gpus", "0", "--data", tmp_path, *changed)
    line = shlex.split(done.stdout.splitlines()[1])
    assert given(line, "--lr") == "3e-4" and "--pretrained-image" not in line and "--lock-text" in line
    assert line.count("--name") == 1 and given(line, "--name") == "other"
    assert (given(line, "--device"), given(line, "--precision")) == ("cpu", "fp32")


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("loss-chunks=64", "there is no flag --loss-chunks; did you mean --loss-chunk?"),
        ("lr=fast", "--lr: invalid float value: 'fast'"),
        ("accum-freq=2", "--accum-freq"),
    ],
)
def test_a_slip_in_a_setting_is_told_before_anything_is_started(tmp_path, slip, said):
    done = recipes("train-14m", "--dry-run", "--no-slurm", "--gpus", "8", "--data", tmp_path, *settings(slip))
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr
    assert "torch.distributed.run" not in done.stdout


def test_the_papers_runs_ask_for_what_the_paper_says(tmp_path):
    """A.9's transform and five captions wherever a set is scored (2.2, Table 2), no TokenDrop in 5.1, all masks drawn again for
    Table 6, the released code's temperature."""
    for source in ("coco/test", "f30k/test"):
        (tmp_path / source).mkdir(parents=True)

    def flags(name: str, *settings: str, data: Path = tmp_path) -> dict:
        return training_flags(RECIPES[name], name, data, Hardware(8, 32), parse_settings(settings))

    for name in TRAININGS:
        own = name != "datacompdr-12m"  # not the paper's
        found = flags(name)
        assert found["retrieval-data"] is not None
        assert [found.get(f"retrieval-{what}") for what in ("transform", "captions")] == (
            ["paper", "5"] if own else [None, None]
        )
        assert ("temperature-parameter" in (found.get("ablate") or "")) == own
        assert not any(flag.startswith("retrieval-") for flag in flags(name, "retrieval-data="))
        # One's own sets are scored alike, whether the paper's are there or not.
        mine = [flags(name, "retrieval-data=a=/d/a", data=data) for data in (tmp_path, tmp_path / "none")]
        assert [one.get("retrieval-transform") for one in mine] == [found.get("retrieval-transform")] * 2
    assert flags("train-14m")["token-drop"] == "0.25" and "token-drop" not in flags("train-100m")
    assert (flags("no-replay")["ablate"], flags("no-replay")["dga-retain"]) == ("no-replay temperature-parameter", "0")


def test_with_sbatch_the_batch_file_is_submitted(tmp_path):
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "Submitted batch job 7"; echo "$@" > {tmp_path}/submitted\n')
    (tmp_path / "sbatch").chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for source in ("coco/train", "coco/test"):
        (tmp_path / source).mkdir(parents=True)
        (tmp_path / source / "0.tar").touch()
    command = [*RECIPES_PROGRAM, "train-finetune-coco", "--data", tmp_path, "--gpus", "8", "--gpu-memory", "32"]
    command += ["--nodes", "2", "--sbatch=--partition=gpu", *settings("init-from=a.pt")]
    blind = subprocess.run([*command[:6], *command[10:]], env=environment, capture_output=True, text=True)
    assert blind.returncode == 1 and "no GPUs, so those of a SLURM node are not known: give --gpus" in blind.stderr
    assert not (tmp_path / "submitted").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Submitted batch job 7" in done.stdout
    submitted = (tmp_path / "submitted").read_text().split()
    assert {"--nodes=2", "--gres=gpu:8", "--partition=gpu", "--job-name=finetune-coco"} <= set(submitted)
    own = submitted[submitted.index(str(ROOT / "scripts" / "paper" / "train.sbatch")) :]
    assert own[1:6] == ["--ranks", "8", "--report", "finetune-coco", "--"]
    assert (given(own, "--batch-size"), given(own, "--dga-steps"), given(own, "--epochs")) == ("128", "1", "1")
    assert given(own, "--train-num-samples") == str(5000 * 2048)
    assert given(own, "--retrieval-data") == f"coco={tmp_path}/coco"


def test_what_a_recipe_cannot_start_without_is_asked_for(tmp_path):
    done = recipes("finetune-f30k", "--data", tmp_path)
    assert done.returncode == 1 and "give --set init-from=" in done.stderr
    done = recipes("nothing")
    assert done.returncode == 2 and "no recipe 'nothing'" in done.stderr
    done = recipes("train-14m", "--nodes", "2", "--no-slurm", "--dry-run", "--data", tmp_path)
    assert done.returncode == 1 and "--nodes 2 needs SLURM" in done.stderr


def test_the_plan_gets_the_recipes_flags_and_chooses_the_batch_itself(tmp_path):
    done = recipes("14m", "--plan", "--assume", "v100:8", "--dry-run", "--data", tmp_path)
    line = shlex.split(done.stdout.splitlines()[1])
    assert line[line.index("plan") :][:5] == ["plan", "--effective-batch", "16384", "--assume", "v100:8"]
    assert "--batch-size" not in line and "--dga-steps" not in line and "--device" not in line
    here = recipes("14m", "--plan", "--dry-run", "--gpus", "0", "--data", tmp_path, *settings("batch-size=4"))
    line = shlex.split(here.stdout.splitlines()[1])
    assert given(line, "--device") == "cpu" and given(line, "--batch-size") == "4" and "--assume" not in line


def test_stored_teachers_are_asked_for_and_planned_with_the_run(tmp_path):
    """Their embeddings lie in DATA/teacher, where nothing else is said."""
    recipe = RECIPES["distill-14m"]
    flags = training_flags(recipe, "distill-14m", tmp_path, Hardware(8, 32), {})
    assert flags["teacher"] == f"{tmp_path}/teacher"

    def line(*words: str) -> list[str]:
        values = parse_settings(words)
        flags = training_flags(recipe, "distill-14m", tmp_path, Hardware(8, 32), values)
        return plan_line(recipe, flags, values, "v100:8")

    def asked(line: list[str], flag: str) -> list[str]:
        return [line[at + 1] for at, word in enumerate(line) if word == flag]

    models = ["ViT-L-14-quickgelu/openai", "ViT-L-14/datacomp_xl_s13b_b90k"]
    assert [asked(line(), f"--teacher{what}") for what in ("", "-model", "-views")] == [
        [f"{tmp_path}/teacher"], models, ["4"],
    ]  # fmt: skip
    others = line("teacher=/t", "teacher-model=ViT-H-14", "teacher-views=9")
    assert [asked(others, f"--teacher{what}") for what in ("", "-model", "-views")] == [["/t"], ["ViT-H-14"], ["9"]]
    assert not [word for word in line("teacher=") if word.startswith("--teacher")]
    for source in recipe.sources:
        (tmp_path / source).mkdir()
        (tmp_path / source / "00000.tar").touch()
    missing = missing_for(recipe, tmp_path, {})
    assert missing.startswith(f"{tmp_path}/teacher holds no teachers' embeddings; --plan (make plan-...) prints the")
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "embeddings.json").touch()
    assert missing_for(recipe, tmp_path, {}) is None
    assert missing_for(recipe, tmp_path, {"teacher": "/t"}).startswith("/t holds no teachers' embeddings")
    assert missing_for(recipe, tmp_path, {"teacher": "shards:4,3"}) is None


@pytest.mark.parametrize("gpus", [1, 8])
def test_both_recipes_with_teachers_are_planned_with_them(tmp_path, monkeypatch, capsys, gpus):
    """A small student; the teachers are the recipe's, 14.23 M pairs are Table 2's."""
    model = register(tmp_path / "configs", "recipes-plan", NATIVE_VISION, CLIP_TEXT)
    started = []
    monkeypatch.setattr(paper_recipes, "run_line", lambda name, line, **_: started.append(line) or 0)
    plans = {}
    for name in ("distill-14m", "datacompdr-12m"):
        words = [name, "--plan", "--assume", f"a100-80:{gpus}", "--data", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["recipes.py", *words, *settings(f"model={model}", "pretrained-image=")])
        assert paper_recipes.main() == 0
        assert zerovl_main([*started[-1][3:], "--json"]) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    made, in_shards = plans.values()
    assert made["teachers"]["stored_bytes"] == 2 * 2 * 768 * 14_230_000 * (4 + 1)
    assert made["teachers"]["models"] == list(RECIPES["distill-14m"].teachers)
    assert 0 < made["teacher_hours"] < made["hours_with_teachers"] == made["teacher_hours"] + made["hours"]
    assert (made["batching"]["ranks"], made["batching"]["effective_batch"], made["epoch_steps"]) == (gpus, 16384, 867)
    assert in_shards["teachers"]["widths"] == [768, 768] and in_shards["teacher_hours"] is None
    assert (in_shards["batching"]["ranks"], in_shards["batching"]["effective_batch"]) == (gpus, 8192)
    assert in_shards["steps"] == 30_000 and in_shards["hours_with_teachers"] == in_shards["hours"] > 0


def test_a_plan_says_what_the_run_will_ask_for(tmp_path):
    done = recipes("finetune-coco", "--plan", "--assume", "v100:8", "--dry-run", "--data", tmp_path)
    assert done.returncode == 0 and "the run needs it: give --set init-from=" in done.stderr


def test_the_make_targets_call_the_launcher():
    def command(*words: str) -> str:
        done = subprocess.run(
            ["make", "--no-print-directory", "-n", *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    assert command("train-14m", "DATA=/d", "DRY_RUN=1").endswith(
        "scripts.paper.recipes train-14m --data '/d' --dry-run"
    )
    assert command("train-finetune-coco", "ARGS=--nodes 2").endswith(
        "scripts.paper.recipes train-finetune-coco --nodes 2"
    )
    spaced = shlex.split(command("train-14m", "DATA=/my data; touch it's"))
    assert spaced[-2:] == ["--data", "/my data; touch it's"]
    assert command("finetune-coco-288").endswith("scripts.paper.recipes finetune-coco-288")
    assert command("plan-14m", "ASSUME=v100:8").endswith("scripts.paper.recipes train-14m --plan --assume 'v100:8'")


def test_nodes_meet_at_the_first_and_one_process_needs_no_torchrun():
    node = Node(8, nodes=2, index=1, master_addr="n1", master_port="29400")
    line = command_line(node, ["--name", "a"])
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=n1", "--master-port=29400", "--nproc-per-node=8"} <= set(line)
    assert line[-4:] == ["training.main", "--", "--name", "a"]
    assert command_line(Node(1), ["--name", "a"])[1:] == ["-m", "training.main", "--name", "a"]
    assert run_folder(["--lr", "1", "--name", "a"]) == Path("logs/a")
    assert run_folder(["--name", "a", "--logs", "b"]) == Path("b/a") and run_folder([]) is None


def test_the_288_px_model_takes_what_convert_writes_and_its_export_loads_in_stock_open_clip(tmp_path):
    """The fine-tuning at 288 px starts from a 224 px ViT of timm, by --init-from of a folder that convert wrote."""
    name = "zerovl-ViT-B-16-288-BERT-base"
    bert = write_bert(tmp_path / "bert")
    with torch.device("meta"):
        trunk = timm.create_model("vit_base_patch16_224.augreg_in21k", num_classes=0)
    config = open_clip.get_model_config(name)
    assert config["vision_cfg"] == native_vision_config(trunk, 288)
    weights = trunk.state_dict()
    weights["pos_embed"] = resample_positions(weights["pos_embed"], 288 // 16)
    converted = {key: value.shape for key, value in as_native_vit(weights).items()}
    torch.manual_seed(0)
    model = open_clip.create_model(with_text_model(name, bert), pretrained_text=False)
    own = {key: value.shape for key, value in model.visual.state_dict().items() if key != "proj"}
    assert own == converted and model.visual.proj.shape == (768, 512)
    checkpoint = write_run(tmp_path / "run", model, {"model": name, "text_model": str(bert)})
    exported = open_clip.create_model(f"local-dir:{export_local_dir(checkpoint, tmp_path / 'exported')}")
    images = torch.randn(1, 3, 288, 288)
    with torch.no_grad():
        assert torch.equal(exported.eval().encode_image(images), model.eval().encode_image(images))
    for recipe in ("finetune-coco-288", "finetune-f30k-288"):
        assert RECIPES[recipe].flags["model"] == name and "init-from" in RECIPES[recipe].needs


# ---------------------------------------------------------------------------------------------------------------------
# Started
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A DATA folder with all sources and sets of the recipes, small, and a BERT folder."""
    folder = tmp_path_factory.mktemp("recipes")
    digits = ["sample", *"0123456789", *(f"##{digit}" for digit in "0123456789")]
    write_bert(folder / "bert", words=[*WORDS, *digits])
    for number, source in enumerate(
        ("sbu", "vg", "cc3m", "cc12m", "web", "coco/train", "f30k/train", "cc3m-long", "cc3m-short")
    ):
        write_source(folder / "data" / source, 1000 * number, 40, 20)
    for name in ("coco", "f30k"):
        write_retrieval_set(folder / name, [2] * 8)
        for part in (folder / name).iterdir():
            part.rename(folder / "data" / name / part.name)
    reinforced = [m for n in range(40) for m in members_of(n, "whole")]
    write_tar(folder / "data" / "datacompdr-12m" / "00000.tar", reinforced)
    for split, count in (("train", 6), ("val", 2)):
        for label in range(2):
            members = [(f"{n:03d}.png", png((120 * label, 7 * n, 9), 32)) for n in range(count)]
            place = folder / "data" / "imagenet" / split / f"class{label}"
            place.mkdir(parents=True)
            for name, content in members:
                (place / name).write_bytes(content)
    return folder


def small(folder: Path, *values: str) -> list[str]:
    """Settings that make a recipe a run of the emoji model with a ViT on the CPU; all its methods stay on."""
    return settings(
        "model=zerovl-emoji-vit", f"text-model={folder / 'bert'}", f"logs={folder / 'logs'}", "pretrained-image=",
        "workers=0", "log-every-n-steps=1", *values,
    )  # fmt: skip


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / "logs" / name / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]


@pytest.mark.slow  # a training of each recipe, two minutes on two cores though they share one start of Python
@pytest.mark.timeout(600)
def test_every_recipe_starts_and_takes_its_steps(workplace):
    data, base = workplace / "data", workplace / "logs" / "train-14m" / "checkpoints" / "epoch_1.pt"
    trainings = ForkedTrainings(ENVIRONMENT)
    try:
        for name in TRAININGS:
            recipe = RECIPES[name]
            if name == "clusters":
                cc12m = ["--data", f"cc12m={data / 'cc12m'}", "--out", data / "cc12m-clusters"]
                zerovl("cluster", base, "--clusters", "3", *cc12m)
            steps = max(3, len(recipe.sources))  # debiased sampling takes one from each source at least
            values = ["effective-batch=4", f"batch-size={2 if recipe.dga else 4}", "epochs=1"]
            values += [f"train-num-samples={4 * steps}"]
            if recipe.teachers:
                sources = "::".join(f"{source}={data / source}" for source in recipe.sources)
                seen = ["--image-size", "32", "--aug-cfg", "scale=(0.6,1.0)", "--auto-augment", "imagenet"]
                zerovl("teacher", base, "--train-data", sources, "--out", data / "teacher", *seen)
            values += [f"{need}={base}" for need in recipe.needs]
            values += ["teacher=shards:4,3"] * (name == "datacompdr-12m")
            shown = recipes(name, "--dry-run", "--no-slurm", "--gpus", "0", "--data", data, *small(workplace, *values))
            assert shown.returncode == 0 and "missing" not in shown.stderr, shown.stderr
            line = shlex.split(shown.stdout.splitlines()[1])
            assert line[1:3] == ["-m", "training.main"]
            answer, printed = trainings(line[3:], workplace / f"{name}.txt")
            assert answer["statuses"] == [0], f"{name}: {answer}\n{printed[-3000:]}"
            words = (workplace / "logs" / name / "out.log").read_text()
            assert words.count("Train Epoch: 0 [") == steps and f" {steps} steps of 4 samples" in words, name
            assert "rsum" in words  # of the sets under DATA
    finally:
        trainings.close()


def test_the_linear_probe_runs_through_the_launcher(workplace, tmp_path):
    out = tmp_path / "probe"
    (workplace / "clip").mkdir(exist_ok=True)
    name = register(workplace / "clip", "recipes-probe", NATIVE_VISION, bert_text(workplace / "bert"))
    checkpoint = write_run(workplace / "clip" / "run", random_model(name), {"model": name})
    folder = export_local_dir(checkpoint, tmp_path / "exported")
    quick = settings(f"model={folder}", f"out={out}", "batch-size=4", "epochs=2", "workers=0")
    done = recipes("linear-probe", "--gpus", "0", "--data", workplace / "data", *quick)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((out / "linear_probe.json").read_text())
    assert json.dumps(result).count("top1") and (out / "state.pt").exists()
    assert result["test_transform"] == "squash 256, crop 224" and not result["settings"]["batch_norm"]


def test_a_probe_of_a_dataset_names_it_for_both_parts(tmp_path):
    line = probe_line(RECIPES["linear-probe-cub"], "linear-probe-cub", tmp_path, Hardware(8, 32), {"model": "M"})
    assert given(line, "--train") == given(line, "--test") == f"cub:{tmp_path}/cub"
    assert (given(line, "--batch-size"), given(line, "--lr"), "--amp" in line) == ("512", "6.4", True)


def test_the_report_is_one_table_with_the_papers_row_where_there_is_one():
    scores = {f"{way}_R@{k}": 10.0 * k for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    before = {**scores, "rsum": 320.0, "images": 8, "captions": 40}
    paper = {"image_to_text_R@1": 72.9, "rsum": 485.0}
    comparison = Comparison(before, {**before, "rsum": 321.5}, paper, ("a", "b"), "coco", "own")
    lines = comparison.table().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "I2T R@1", "I2T R@5", "I2T R@10", "T2I R@1", "T2I R@5", "T2I R@10", "RSUM",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[2].split("|")[2:5]] == ["10.0", "10.0", "72.9"]
    assert [cell.strip() for cell in lines[3].split("|")[2:5]] == ["50.0", "50.0", ""]
    assert [cell.strip() for cell in lines[-1].split("|")[2:5]] == ["320.0", "321.5", "485.0"]
    assert len({len(line) for line in lines}) == 1
    assert "8 images, 40 captions" in comparison.caption() and "Before: `a`. After: `b`." in comparison.caption()
    without = Comparison(before, before, {}, ("a", "b"), "coco", "own").table()
    assert "paper" not in without and "485.0" not in without


@pytest.mark.slow  # two trainings, the report and two retrieval runs to compare with, each a program: a minute on two cores
def test_a_fine_tuning_ends_with_one_table_before_and_after(workplace):
    """Through the launcher; the columns are `zerovl retrieval`'s own numbers of the two checkpoints."""
    start = workplace / "start"
    values = ["effective-batch=8", "batch-size=8", "epochs=1", f"logs={start}", "retrieval-data=", "name=base"]
    base = ["clip", "--no-slurm", "--gpus", "0", "--data", workplace / "data", *small(workplace, *values)]
    assert recipes(*base).returncode == 0
    before, after = start / "base/checkpoints/epoch_1.pt", start / "finetune-coco/checkpoints/epoch_1.pt"
    values = [f"init-from={before}", "effective-batch=8", "batch-size=4", "train-num-samples=80", f"logs={start}"]
    values += ["lr=1e-2", "lr-min=1e-3"]
    tune = ["train-finetune-coco", "--no-slurm", "--gpus", "0", "--data", workplace / "data"]
    done = recipes(*tune, *small(workplace, *values))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((start / "finetune-coco" / "finetune.json").read_text())
    assert result["before"]["checkpoint"] == str(before) and result["after"]["checkpoint"] == str(after)
    assert done.stdout.count("RSUM") == 1 and done.stdout.count("R@10") == 2
    markdown = (start / "finetune-coco" / "finetune.md").read_text()
    assert markdown in done.stdout
    (rsum_row,) = (line for line in markdown.splitlines() if "RSUM" in line)
    for column, checkpoint in (("before", before), ("after", after)):
        scores = workplace / f"{column}.json"
        retrieval = ["retrieval", checkpoint, "--data", f"coco={workplace / 'data/coco'}", "--paper-transform"]
        zerovl(*retrieval, "--output", scores)
        expected = json.loads(scores.read_text())["results"]["coco"]
        for key in ("image_to_text_R@1", "image_to_text_R@5", "text_to_image_R@10"):
            assert result[column][key] == pytest.approx(100 * expected[key], abs=1e-9)
        assert result[column]["rsum"] == pytest.approx(expected["rsum"], abs=1e-9)
        assert f"{expected['rsum']:.1f}" in rsum_row
    assert result["before"] != {**result["after"], "checkpoint": str(before)}
    assert result["paper"]["rsum"] == 485.0 and "| RSUM" in markdown and "485.0" in markdown
    refused = subprocess.run(
        [warm.python(), "-m", "scripts.paper.finetune_report", start / "base"],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2 and "was trained without --init-from" in refused.stderr


def descendants(pid: int) -> list[int]:
    below = children_of(pid)
    return [*below, *(child for parent in below for child in descendants(parent))]


def start(command: list[str | Path], log: Path) -> subprocess.Popen:
    with open(log, "a") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)


def wait_for_step(folder: Path, step: int, run: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 150
    while not any(int(path.stem[-8:]) >= step for path in (folder / "checkpoints").glob("step_*.pt")):
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.slow  # four starts of two or four ranks: one to two minutes each on two cores
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_stopped_and_killed_the_same_command_ends_as_if_never_interrupted(workplace, ranks):
    values = ["effective-batch=16", f"batch-size={8 // ranks}", "epochs=1", "train-num-samples=960"]
    values += ["save-every-steps=5", "workers=1", "retrieval-data="]
    given = ["--no-slurm", "--gpus", "0", "--processes", str(ranks), "--data", workplace / "data"]
    whole, broken = (
        [*RECIPES_PROGRAM, "train-14m", *given, *small(workplace, *values), *settings(f"name={name}{ranks}")]
        for name in ("whole", "broken")
    )
    folder, log = workplace / "logs" / f"broken{ranks}", workplace / f"broken{ranks}.txt"
    run = start(broken, log)
    try:
        wait_for_step(folder, 10, run, log)
        run.terminate()  # as a scheduler does
        assert run.wait(timeout=60) == 85
        assert "the same command goes on from it" in log.read_text() and (folder / "requeue").exists()
        stopped = max(int(path.stem[-8:]) for path in (folder / "checkpoints").glob("step_*.pt"))
        run = start(broken, log)
        wait_for_step(folder, stopped + 5, run, log)
        for pid in [*descendants(run.pid), run.pid]:  # a lost machine: nobody is asked
            os.kill(pid, signal.SIGKILL)
        assert run.wait(timeout=60) == -signal.SIGKILL
        run = start(broken, log)
        assert run.wait(timeout=200) == 0, log.read_text()[-3000:]
        run = start(whole, log)
        assert run.wait(timeout=200) == 0, log.read_text()[-3000:]
    finally:
        if run.poll() is None:
            for pid in [*descendants(run.pid), run.pid]:
                os.kill(pid, signal.SIGKILL)
    ours, theirs = weights(workplace, f"broken{ranks}"), weights(workplace, f"whole{ranks}")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert f"step_0000_{stopped:08d}.pt" in log.read_text()  # it did go on from there


SLOW_TO_SAVE = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
pathlib.Path(f"started{os.environ['RANK']}").touch()
while not asked:
    time.sleep(0.05)
time.sleep(float(sys.argv[-1]))
pathlib.Path(f"saved{os.environ['RANK']}").touch()
pathlib.Path("logs/a/requeue").touch()
while len(list(pathlib.Path().glob("saved*"))) < 2:  # as in a training: torchrun would end the later one
    time.sleep(0.05)
sys.exit(85)
"""


def stopped_by(tmp_path: Path, number: signal.Signals, saving_seconds: float, everyone: bool) -> tuple[int, list[str]]:
    """Two ranks under the launcher that take their time to save; its status and what they left.

    Args:
        everyone: signal torchrun, too, as some schedulers do.
    """
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(SLOW_TO_SAVE)
    (tmp_path / "logs" / "a").mkdir(parents=True)
    command = [sys.executable, "-m", "scripts.paper.launch", "--ranks", "2", "--", "--name", "a"]
    run = subprocess.Popen(
        [*command, str(saving_seconds)],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src")))},
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("started*"))) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        for pid in [run.pid, *(children_of(run.pid) if everyone else [])]:
            os.kill(pid, number)
        status = run.wait(timeout=saving_seconds + 30)
    finally:
        for pid in [*descendants(run.pid), run.pid] if run.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
    return status, sorted(path.name for path in tmp_path.glob("saved*"))


@pytest.mark.parametrize(
    ("number", "saving_seconds", "everyone"),
    [
        (signal.SIGUSR1, 0.5, True),
        (signal.SIGTERM, 0.5, False),
        # torchrun kills its ranks 30 s after it was told to stop itself
        pytest.param(signal.SIGTERM, 34, False, marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_the_ranks_have_the_time_they_need(tmp_path, number, saving_seconds, everyone):
    assert stopped_by(tmp_path, number, saving_seconds, everyone) == (85, ["saved0", "saved1"])


def test_training_ends_with_a_launcher_that_is_killed(tmp_path):
    """A scheduler starts the job again, and two runs would write into one folder."""
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "scripts.paper.launch", "--ranks", "1", "--", "--name", "a"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src")))},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline or os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def test_an_earlier_stop_is_not_taken_for_this_ones(workplace, tmp_path):
    (tmp_path / "logs" / "a").mkdir(parents=True)
    (tmp_path / "logs" / "a" / "requeue").touch()
    command = [sys.executable, "-m", "scripts.paper.launch", "--ranks", "1", "--", "--name", "a"]
    done = subprocess.run(
        [*command, "--dataset-type", "synthetic", "--model", "nothing"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "knows no model 'nothing'" in done.stderr


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
    values = small(workplace, "name=slow", "effective-batch=8", "batch-size=4", "retrieval-data=", "save-every-steps=")
    shown = recipes("clip", "--dry-run", "--no-slurm", "--gpus", "0", "--data", workplace / "data", *values)
    arguments = shlex.split(shown.stdout.splitlines()[1])[3:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    log, folder = tmp_path / "log", workplace / "logs" / "slow"
    run = start([*torchrun, tmp_path / "slow.py", *arguments], log)
    try:
        deadline = time.monotonic() + 120
        while "Train Epoch" not in ((folder / "out.log").read_text() if (folder / "out.log").exists() else ""):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        for rank in children_of(run.pid):
            os.kill(rank, signal.SIGUSR1)
        run.wait(timeout=120)
    finally:
        if run.poll() is None:
            for pid in [*descendants(run.pid), run.pid]:
                os.kill(pid, signal.SIGKILL)
    assert len(list((folder / "checkpoints").glob("step_*.pt"))) == 1 and (folder / "requeue").exists()
