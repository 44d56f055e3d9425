"""Every flag of open_clip's parser, with named sources and DGA for two steps: works, or is refused in one sentence.

The flags are enumerated from open_clip's own parser: one that this table does not classify fails the test, and so does a
traceback, a hang, or a run that works where it should be refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.tars import png, write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from training.params import open_clip_parser

WORKS = ""  # exit status 0 after two steps; any other outcome is a part of the sentence of a refusal
LIMIT_SECONDS = 120

# Option -> ("words given to it, and to flags beside it", outcome). "{...}" are folders and files of `place`. A `!` in front
# of a flag leaves it out of the command that all cases share.
TABLE: dict[str, list[tuple[str, str]]] = {
    "--train-data": [("a={place}/a", WORKS), ("a=/nowhere", "/nowhere")],
    "--train-data-upsampling-factors": [("2::1", WORKS), ("a=1", WORKS), ("1::x", "1::x"), ("1", "1 weights for 2 sources")],
    "--val-data": [("{place}/pairs.csv", WORKS), ("/nowhere.csv", "--val-data /nowhere.csv does not exist")],
    "--train-num-samples": [("16", WORKS), ("0", "--train-num-samples 0 is out of range")],
    "--val-num-samples": [("4", WORKS), ("0", "--val-num-samples 0 is out of range")],
    "--dataset-type": [
        ("webdataset", WORKS), ("auto", WORKS), ("csv", "--dataset-type csv does not work with named sources"),
        ("synthetic", "--dataset-type synthetic does not work with named sources"),
    ],
    "--dataset-resampled": [("", WORKS)],
    "--csv-separator": [(",", WORKS)],
    "--csv-img-key": [("image", WORKS)],
    "--csv-caption-key": [("caption", WORKS)],
    "--imagenet-val": [("/nowhere", "--imagenet-val /nowhere is no folder")],
    "--imagenet-v2": [("/nowhere", "--imagenet-v2 /nowhere")],
    "--cache-dir": [("{place}/cache", WORKS)],
    "--logs": [("{place}/elsewhere", WORKS), ("{place}/pairs.csv", "pairs.csv is a file"), ("none", WORKS)],
    "--log-local": [("", WORKS)],
    "--name": [("named", WORKS)],
    "--workers": [("1", WORKS), ("-1", "--workers -1 is out of range")],
    "--batch-size": [("2", WORKS), ("0", "--batch-size 0 is out of range")],
    "--epochs": [("2", WORKS), ("0", "--epochs 0 is out of range")],
    "--epochs-cooldown": [
        ("1 --lr-scheduler const-cooldown", WORKS), ("-1", "--epochs-cooldown -1 is out of range"),
        ("9", "--epochs-cooldown 9 is out of range"),
    ],
    "--lr": [("1e-3", WORKS), ("-1", "--lr -1.0 is out of range")],
    "--beta1": [("0.8", WORKS), ("2", "--beta1 2.0 is out of range")],
    "--beta2": [("0.9", WORKS), ("-1", "--beta2 -1.0 is out of range")],
    "--eps": [("1e-6", WORKS), ("-1", "--eps -1.0 is out of range")],
    "--wd": [("0.1", WORKS), ("-1", "--wd -1.0 is out of range")],
    "--momentum": [("0.9 --opt timm/sgd --lr 1e-3 --eps 1e-8", WORKS), ("-1", "--momentum -1.0 is out of range")],
    "--warmup": [("1", WORKS), ("0", WORKS), ("-1", "--warmup -1 is out of range")],
    "--opt": [
        ("adamw", WORKS), ("AdamW", WORKS), ("timm/lamb --lr 1e-3 --eps 1e-6", WORKS),
        ("timm/lamb", "--opt timm/lamb needs --lr"),
        ("timm/lamb --lr 1e-3", "--opt timm/lamb needs --eps"), ("sgd", "--opt sgd is out of range; give adamw, or timm/NAME"),
        ("timm/nothing --lr 1e-3 --eps 1e-6", "--opt timm/nothing"), ("timm/adamw --lr 1e-3 --eps 1e-6 --beta1 0.9", "--beta2"),
    ],
    "--use-bn-sync": [("", WORKS)],
    "--skip-scheduler": [("", WORKS)],
    "--lr-scheduler": [
        ("cosine", WORKS), ("const", WORKS), ("const-cooldown", "--lr-scheduler const-cooldown needs --epochs-cooldown"),
        ("linear", "--lr-scheduler linear is out of range"),
    ],
    "--lr-cooldown-end": [
        ("1e-5 --lr-scheduler const-cooldown --epochs-cooldown 1", WORKS), ("-1", "--lr-cooldown-end -1.0 is out of range"),
    ],
    "--lr-cooldown-power": [
        ("2 --lr-scheduler const-cooldown --epochs-cooldown 1", WORKS), ("-1", "--lr-cooldown-power -1.0 is out of range"),
    ],
    "--save-frequency": [("1", WORKS), ("0", WORKS)],
    "--save-most-recent": [("", WORKS)],
    "--zeroshot-frequency": [("0", WORKS)],
    "--val-frequency": [("0 --val-data {place}/pairs.csv", WORKS)],
    "--resume": [("latest", WORKS), ("/nowhere.pt", "/nowhere.pt")],
    "--precision": [
        (name, WORKS) for name in ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")
    ],
    "--model": [("tiny", WORKS), ("tinny", "knows no model 'tinny'; did you mean")],
    "--pretrained": [("{place}/nowhere.pt", "nowhere.pt"), ("laion2b", "laion2b")],
    "--pretrained-image": [("", "there are no ImageNet weights to load")],
    "--lock-image": [("", WORKS)],
    "--lock-image-unlocked-groups": [
        ("1 --lock-image", WORKS), ("-1 --lock-image", "--lock-image-unlocked-groups -1 is out of range"),
        ("99 --lock-image", WORKS),
    ],
    "--lock-image-freeze-bn-stats": [("--lock-image", WORKS)],
    "--image-mean": [("0.5 0.5 0.5", WORKS), ("0.5", "--image-mean"), ("0.5 0.5", "--image-mean")],
    "--image-std": [("0.5 0.5 0.5", WORKS), ("0.5", "--image-std"), ("0 0 0", "--image-std"), ("0.5 0.5", "--image-std")],
    "--image-interpolation": [(name, WORKS) for name in ("bicubic", "bilinear", "random")],
    "--image-resize-mode": [(name, WORKS) for name in ("shortest", "longest", "squash")],
    "--aug-cfg": [
        ("scale=(0.5,1.0)", WORKS), ("scal=(0.5,1.0)", "--aug-cfg scal="), ("scale", "--aug-cfg is not understood"),
        ("scale=(0.5,", "--aug-cfg is not understood"),
    ],
    "--grad-checkpointing": [("", WORKS)],
    "--local-loss": [("--gather-with-grad", WORKS), ("", "--local-loss without --gather-with-grad does not work with")],
    "--gather-with-grad": [("", WORKS)],
    "--force-context-length": [("12", WORKS), ("0", "--force-context-length 0 is out of range")],
    "--force-image-size": [
        ("16", WORKS), ("16 16", WORKS), ("0", "--force-image-size"), ("16 16 16", "--force-image-size"), ("15", WORKS),
    ],
    "--force-quick-gelu": [("", WORKS)],
    "--force-patch-dropout": [("0.5", WORKS), ("1.5", "--force-patch-dropout 1.5 is out of range")],
    "--force-custom-text": [("", WORKS)],
    "--torchscript": [
        ("", WORKS), ("--lock-image", "--torchscript does not work with --lock-*"),
        ("--freeze text", "--torchscript does not work with --lock-*, --freeze"),
    ],
    "--torchcompile": [("", WORKS), ("--torchscript", "--torchscript does not work with --torchcompile")],
    "--trace": [("", "--trace does not work with the recipe's flags")],
    "--accum-freq": [("2", "--accum-freq 2 does not work with"), ("0", "--accum-freq 0 is out of range")],
    "--device": [("cpu", WORKS), ("cuda", WORKS), ("foo", "torch knows no --device foo")],
    "--dist-url": [("env://", WORKS)],
    "--dist-backend": [("gloo", WORKS)],
    "--report-to": [
        ("tensorboard", WORKS), ("wandb", "--report-to wandb needs the package wandb"), ("foo", "--report-to foo"),
    ],
    "--wandb-notes": [("words", WORKS)],
    "--wandb-project-name": [("words", WORKS)],
    "--debug": [("", WORKS)],
    "--copy-codebase": [("", WORKS), ("--name copied --resume latest", WORKS)],
    "--horovod": [("", "--horovod does not work with the recipe's flags: use torchrun")],
    "--ddp-static-graph": [("", "--ddp-static-graph does not work with")],
    "--no-set-device-rank": [("", WORKS)],
    "--seed": [("3", WORKS), ("-1", "--seed -1 is out of range"), ("4294967296", "--seed 4294967296 is out of range")],
    "--grad-clip-norm": [("1.0", WORKS), ("0", "--grad-clip-norm 0.0 is out of range")],
    "--lock-text": [
        ("--lock-text-freeze-layer-norm", WORKS),
        ("", "--lock-text of open_clip's own text transformer needs --lock-text-freeze"),
    ],
    "--lock-text-unlocked-layers": [
        ("1 --lock-text --lock-text-freeze-layer-norm", WORKS),
        ("-1 --lock-text", "--lock-text-unlocked-layers -1 is out of range"),
    ],
    "--lock-text-freeze-layer-norm": [("--lock-text", WORKS)],
    "--log-every-n-steps": [("1", WORKS), ("0", "--log-every-n-steps 0 is out of range")],
    "--coca-caption-loss-weight": [("1.0", WORKS)],
    "--coca-contrastive-loss-weight": [("1.0", WORKS)],
    "--remote-sync": [("{place}/remote --remote-sync-protocol fsspec --remote-sync-frequency 1", WORKS)],
    "--remote-sync-frequency": [("5", WORKS), ("0", "--remote-sync-frequency 0 is out of range")],
    "--remote-sync-protocol": [("fsspec", WORKS)],
    "--delete-previous-checkpoint": [("", WORKS)],
    "--distill-model": [
        ("tiny --distill-pretrained {place}/x.pt", "--distill-model does not work with --dga-steps"),
    ],
    "--distill-pretrained": [("{place}/x.pt", "--distill-pretrained needs --distill-model")],
    "--use-bnb-linear": [("SwitchBackLinear", "--use-bnb-linear needs the package bitsandbytes")],
    "--siglip": [("", WORKS)],
    "--loss-dist-impl": [
        ("bidir --siglip", WORKS), ("gather --siglip", WORKS), ("foo --siglip", "--loss-dist-impl foo is out of range"),
    ],
}  # fmt: skip


def test_every_flag_of_open_clips_parser_is_in_the_table():
    options = {action.option_strings[-1] for action in open_clip_parser()._actions} - {"--help"}
    assert options == set(TABLE)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flags")
    for name, first in (("a", 0), ("b", 1000)):
        write_source(folder / name, first, 20, 10, px=32)
    rows = ["filepath\ttitle"]
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png((60 * number, 9, 9), 32))
        rows.append(f"{folder}/{number}.png\ta cat")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    vision = {**NATIVE_VISION, "layers": 1, "width": 16, "head_width": 8}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": {**CLIP_TEXT, "layers": 1}}
    (folder / "tiny.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def train(place):
    """Runs training with some arguments: exit status (None: hung), and what it printed."""
    program = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "support" / "forking_training.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdin is not None and program.stdout is not None
    count = 0

    def run(arguments: list[str]) -> tuple[int | None, str]:
        nonlocal count
        count += 1
        shared = {
            "--model": "tiny", "--device": "cpu", "--precision": "fp32", "--warmup": "1", "--batch-size": "4", "--workers": "0",
            "--epochs": "1", "--train-num-samples": "16", "--log-every-n-steps": "1", "--name": f"run{count}",
            "--train-data": f"a={place}/a::b={place}/b", "--dga-steps": "2", "--save-frequency": "0",
        }  # fmt: skip
        line = [word for flag, value in shared.items() if flag not in arguments for word in (flag, value)]
        output = place / f"output{count}"
        request = {
            "arguments": [*line, *arguments], "model_config": str(place / "tiny.json"), "cwd": str(place),
            "output": str(output), "limit": LIMIT_SECONDS,
        }  # fmt: skip
        program.stdin.write(json.dumps(request) + "\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline())["statuses"][0], output.read_text()

    yield run
    program.stdin.close()
    program.wait(timeout=60)


def problem(status: int | None, said: str, outcome: str) -> str | None:
    """What is wrong with how a run ended; None if it is as the table has it."""
    if status is None:
        return "hangs"
    if "Traceback (most recent call last)" in said:
        return f"traceback: {said.splitlines()[-1]}"
    sentences = [line for line in said.splitlines() if line.startswith("training.main: error: ")]
    if outcome == WORKS:
        finished = "Train Epoch: 0" in said and "(100%)" in said
        return None if status == 0 and finished else f"status {status}: {sentences or said[-500:]}"
    if status != 2 or len(sentences) != 1:
        return f"status {status}: {sentences or said[-300:]}"
    return None if outcome in sentences[0] else f"says {sentences[0]!r}"


@pytest.mark.slow  # about 150 trainings of two steps, each in a process forked from one that has imported torch
@pytest.mark.timeout(3600)
def test_every_flag_with_named_sources_and_dga(place, train):
    problems = {}
    for option, cases in TABLE.items():
        for words, outcome in cases:
            arguments = [option, *(word.format(place=place) for word in words.split())]
            wrong = problem(*train(arguments), outcome)
            if wrong is not None:
                problems[" ".join([option, words])] = wrong
    assert not problems, "\n".join(f"{line}\n    {wrong}" for line, wrong in problems.items())
