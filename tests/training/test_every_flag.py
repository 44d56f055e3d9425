"""Every flag of open_clip's parser, with named sources and DGA for two steps: works, or is refused in one sentence.

The flags are enumerated from open_clip's own parser: one that this table does not classify fails the test, and so does a
traceback, a hang, or a run that works where it should be refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.releases import OPENCLIP_V4, line_here
from support.programs import ForkedTrainings
from support.tars import png, write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from training.params import open_clip_parser, parse

WORKS = (
    ""  # exit status 0 after two steps; any other outcome is a part of the sentence of a refusal
)
LIMIT_SECONDS = 120

# Option -> ("words given to it, and to flags beside it", outcome). "{...}" are folders and files of `place`. A `!` in front
# of a flag leaves it out of the command that all cases share.
TABLE: dict[str, list[tuple[str, str]]] = {
    "--train-data": [("a={place}/a", WORKS), ("a=/nowhere", "/nowhere")],
    "--train-data-upsampling-factors": [("2::1", WORKS), ("a=1", WORKS), ("1::x", "1::x"), ("1", "1 weights for 2 sources")],
    "--val-data": [("{place}/pairs.csv", WORKS), ("/nowhere.csv", "/nowhere.csv: No such file")],
    "--train-num-samples": [("16", WORKS), ("0", "--train-num-samples 0 is out of range")],
    "--val-num-samples": [("4", WORKS)],
    "--dataset-type": [
        ("webdataset", WORKS), ("auto", WORKS), ("csv", "--dataset-type csv does not work with named sources"),
        ("synthetic", "--dataset-type synthetic does not work with named sources"),
    ],
    "--dataset-resampled": [("", WORKS)],
    "--csv-separator": [(",", WORKS)],
    "--csv-img-key": [("image", WORKS)],
    "--csv-caption-key": [("caption", WORKS)],
    "--imagenet-val": [("/nowhere", "/nowhere: No such file")],
    "--imagenet-v2": [("/nowhere", "the package imagenetv2_pytorch is not installed here")],
    "--cache-dir": [("{place}/cache", WORKS)],
    "--logs": [("{place}/elsewhere", WORKS), ("{place}/pairs.csv", "Not a directory"), ("none", WORKS)],
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
    "--beta1": [("0.8", WORKS), ("2", "torch: Invalid beta parameter at index 0: 2.0")],
    "--beta2": [("0.9", WORKS)],
    "--eps": [("1e-6", WORKS)],
    "--wd": [("0.1", WORKS), ("-1", "--wd -1.0 is out of range")],
    "--momentum": [("0.9 --opt timm/sgd --lr 1e-3 --eps 1e-8", WORKS)],
    "--warmup": [("1", WORKS), ("0", WORKS), ("-1", "--warmup -1 is out of range")],
    "--opt": [
        ("adamw", WORKS), ("AdamW", WORKS), ("timm/lamb --lr 1e-3 --eps 1e-6", WORKS),
        ("timm/lamb --lr 1e-3", "--opt timm/lamb needs --lr and --eps"),
        ("sgd", "--opt sgd is out of range; give adamw"),
        ("timm/nothing --lr 1e-3 --eps 1e-6", "timm: Optimizer nothing not found"),
        ("timm/adamw --lr 1e-3 --eps 1e-6 --beta1 0.9", "BOTH beta1 and beta2"),
    ],
    "--use-bn-sync": [("", WORKS)],
    "--skip-scheduler": [("", WORKS)],
    "--lr-scheduler": [
        ("cosine", WORKS), ("const", WORKS), ("const-cooldown", "specify the number of cooldown epochs"),
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
        *((name, WORKS) for name in ("amp", "amp_bf16", "amp_bfloat16", "bf16", "pure_bf16", "fp32")),
        # In fp16 alone AdamW's squared gradients are 0, and its first step divides by eps.
        *((name, "the weights are not finite numbers") for name in ("fp16", "pure_fp16")),
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
        ("scale=(0.5,1.0)", WORKS), ("scal=(0.5,1.0)", "keyword argument 'scal'"), ("scale", "is not understood"),
        ("scale=(0.5,", "is not understood"),
    ],
    "--grad-checkpointing": [("", WORKS)],
    "--local-loss": [("--gather-with-grad", WORKS), ("", "--local-loss without --gather-with-grad does not work with")],
    "--gather-with-grad": [("", WORKS)],
    "--force-context-length": [("12", WORKS), ("0", "--force-context-length 0 is out of range")],
    "--force-image-size": [
        ("16", WORKS), ("16 16", WORKS), ("0", "sizes should be greater than 0"), ("15", WORKS),
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
    "--device": [("cpu", WORKS), ("cuda", WORKS), ("foo", "device string: foo")],
    "--dist-url": [("env://", WORKS)],
    "--dist-backend": [("gloo", WORKS)],
    "--report-to": [
        ("tensorboard", WORKS), ("wandb", "Please install wandb"), ("foo", "--report-to foo"),
    ],
    "--wandb-notes": [("words", WORKS)],
    "--wandb-project-name": [("words", WORKS)],
    "--debug": [("", WORKS)],
    "--copy-codebase": [("", "--copy-codebase does not work with the recipe's flags")],
    "--horovod": [("", "--horovod does not work with the recipe's flags: use torchrun")],
    "--ddp-static-graph": [("", "--ddp-static-graph does not work with")],
    "--no-set-device-rank": [("", WORKS)],
    "--seed": [("3", WORKS), ("-1", "--seed -1 is out of range"), ("4294967296", "--seed 4294967296 is out of range")],
    "--grad-clip-norm": [("1.0", WORKS), ("0", "--grad-clip-norm 0.0 is out of range")],
    "--lock-text": [
        ("--lock-text-freeze-layer-norm", WORKS),
        ("", "open_clip: AssertionError: Unfreezing LayerNorm is not supported"),
    ],
    "--lock-text-unlocked-layers": [
        ("1 --lock-text --lock-text-freeze-layer-norm", WORKS),
        ("-1 --lock-text", "--lock-text-unlocked-layers -1 is out of range"),
    ],
    "--lock-text-freeze-layer-norm": [("--lock-text", WORKS)],
    "--log-every-n-steps": [("1", WORKS)],
    "--coca-caption-loss-weight": [("1.0", WORKS)],
    "--coca-contrastive-loss-weight": [("1.0", WORKS)],
    "--remote-sync": [("{place}/remote --remote-sync-protocol fsspec --remote-sync-frequency 1", WORKS)],
    "--remote-sync-frequency": [("5", WORKS)],
    "--remote-sync-protocol": [("fsspec", WORKS)],
    "--delete-previous-checkpoint": [("", WORKS)],
    "--distill-model": [
        ("tiny --distill-pretrained {place}/nowhere.pt", "nowhere.pt"),
        ("tiny --distill-pretrained x.pt --loss-chunk 2", "--distill-model does not work with --siglip"),
    ],
    "--distill-pretrained": [("{place}/x.pt", "--distill-pretrained needs --distill-model")],
    "--use-bnb-linear": [("SwitchBackLinear", "the package bitsandbytes is not installed here")],
    "--siglip": [("", WORKS)],
    "--loss-dist-impl": [
        ("bidir --siglip", WORKS), ("gather --siglip", WORKS), ("foo --siglip", "--loss-dist-impl foo is out of range"),
    ],
}  # fmt: skip


# Differences of open_clip 4: flags of 3.3 that it lacks, and its own.
GONE = ("--torchscript", "--trace", "--horovod")
IGNORED = {  # of models and data that are not the recipe's: nothing reads them
    "--audio-ext": "wav", "--audio-fill": "pad", "--audio-trunc": "trunc", "--audio-fusion": "",
    "--audio-int16-normalize": "", "--audio-zeroshot-split": "test", "--audio-zeroshot-audio-key": "a",
    "--audio-zeroshot-target-key": "a", "--audio-zeroshot-class-key": "a", "--audio-zeroshot-template": "a{{}}",
    "--audio-zeroshot-workers": "1", "--audio-zeroshot-multiprocessing-context": "fork",
    "--audio-multiprocessing-context": "fork", "--naflex-num-train-image-tokens": "64", "--naflex-patch-sizes": "8",
    "--naflex-patch-size-probs": "1", "--naflex-seq-lens": "16", "--naflex-seq-len-probs": "1",
    "--naflex-max-tokens-per-batch": "64", "--naflex-batch-divisor": "2",
    "--naflex-loss-scale": "linear", "--naflex-pad-multiple": "2", "--bucket-pool": "16", "--bucket-chunk": "4",
    "--bucket-prefetch-pools": "1", "--fsdp-no-reshard-after-forward": "", "--fsdp-offload-cpu": "",
    "--text-pooler-own-group": "", "--torchcompile-backend": "eager", "--torchcompile-mode": "default",
}  # fmt: skip
SOURCES, STEP, DECAY = (
    "does not work with named sources",
    "does not work with the recipe's step",
    "--no-embedding-decay",
)
OF_OPENCLIP_V4: dict[str, list[tuple[str, str]]] = {
    **{option: [(value, WORKS)] for option, value in IGNORED.items()},
    "--torchcompile": [
        ("--torchcompile-strategy model", WORKS), ("", "--torchcompile-strategy task compiles open_clip's own step"),
    ],
    "--torchcompile-strategy": [("step", WORKS), ("step --torchcompile", "--torchcompile-strategy step compiles")],
    "--report-to": [*TABLE["--report-to"], ("trackio", "trackio")],
    "--opt": [*TABLE["--opt"], ("nadamw", WORKS), ("nadamw --no-embedding-decay", "--opt nadamw does not work with")],
    "--dataset-type": [*TABLE["--dataset-type"], ("webdataset-audio", "--dataset-type webdataset-audio does not work with")],
    "--pretrained-audio": [("x", "--pretrained-audio does not work with the recipe's flags")],
    "--audio-zeroshot-dataset": [("x", "--audio-zeroshot-dataset does not work with the recipe's flags")],
    "--image-key": [("png", f"--image-key {SOURCES}")],
    "--text-key": [("caption", f"--text-key {SOURCES}")],
    "--json-text-key": [("caption", f"--json-text-key {SOURCES}")],
    "--json-text-key-probs": [("1", f"--json-text-key-probs {SOURCES}")],
    "--max-image-pixels": [("9", f"--max-image-pixels {SOURCES}")],
    "--length-bucketing": [("", f"--length-bucketing {SOURCES}")],
    "--naflex-max-text-tokens": [("8", f"--naflex-max-text-tokens {SOURCES}")],
    "--opt-kwargs": [
        ("eps=1e-6", WORKS), ("eps=1e-6 --no-embedding-decay", DECAY), ("eps", "is not understood"),
    ],
    "--opt-fallback-list": [("a", "--opt-fallback-list"), ("a --no-embedding-decay", DECAY)],
    "--text-layer-decay": [("0.9", WORKS), ("0.9 --no-embedding-decay", DECAY), ("2", "--text-layer-decay")],
    "--visual-layer-decay": [("0.9", WORKS), ("0.9 --no-embedding-decay", DECAY), ("2", "--image-layer-decay")],
    "--audio-layer-decay": [("0.9", "--audio-layer-decay"), ("0.9 --no-embedding-decay", DECAY)],
    "--wd-exclude": [("*.bias", WORKS), ("*.bias --no-embedding-decay", DECAY)],
    "--val-retrieval-chunk-size": [("2 --val-data {place}/pairs.csv", WORKS)],
    "--val-retrieval-precision": [("model --val-data {place}/pairs.csv", WORKS)],
    "--fsdp": [("", f"--fsdp {STEP}")],
    "--fsdp-checkpoint": [("sharded", WORKS)],
    "--use-naflex": [("", f"--use-naflex {STEP}")],
    "--force-naflex-vision": [("", f"--force-naflex-vision {STEP}")],
    "--log-metric-every-n-steps": [("1", WORKS)],
    "--train-loss-ema-samples": [("10", WORKS), ("-1", "--train-loss-ema-samples must be >= 0")],
    "--text-pad-multiple": [("2", WORKS), ("0", "--text-pad-multiple must be > 0")],
}  # fmt: skip
# Of open_clip's main branch since the snapshot that was tested.
NEWEST = {
    "--force-naflex-patch-interp": [("", f"--force-naflex-patch-interp {STEP}")],
    "--torchcompile-pass-break": [("", WORKS)],
}
if line_here() is OPENCLIP_V4:
    TABLE = {
        option: cases for option, cases in TABLE.items() if option not in GONE
    } | OF_OPENCLIP_V4
    TABLE |= {
        option: cases
        for option, cases in NEWEST.items()
        if option in open_clip_parser()._option_string_actions
    }


def test_every_flag_of_open_clips_parser_is_in_the_table():
    options = {action.option_strings[-1] for action in open_clip_parser()._actions} - {"--help"}
    assert options == set(TABLE)


def test_what_a_command_line_alone_contradicts_is_refused_before_anything_is_opened():
    """The rest of the table's refusals need data or a model, and open_clip's own come from its main."""
    refused = 0
    for option, cases in TABLE.items():
        for words, outcome in cases:
            line = f"--train-data a=/x --dga-steps 2 --precision fp32 {option} {words.format(place='/x')}"
            try:
                parse(line.split())
            except (UserError, ValueError) as error:  # ValueError: of open_clip 4's own parser
                assert outcome and outcome in str(error), (line, str(error))
                refused += 1
    assert refused >= 42


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
    """Runs training with some arguments: exit status (None: hung), and its output."""
    trainings = ForkedTrainings()
    count = 0

    def run(arguments: list[str]) -> tuple[int | None, str]:
        nonlocal count
        count += 1
        shared = {
            "--model": "tiny", "--device": "cpu", "--precision": "fp32", "--warmup": "1", "--batch-size": "4", "--workers": "0",
            "--epochs": "1", "--train-num-samples": "16", "--log-every-n-steps": "1", "--name": f"run{count}",
            "--train-data": f"a={place}/a::b={place}/b", "--dga-steps": "2", "--save-frequency": "0",
        }  # fmt: skip
        line = [
            word
            for flag, value in shared.items()
            if flag not in arguments
            for word in (flag, value)
        ]
        request = {
            "model_config": str(place / "tiny.json"),
            "cwd": str(place),
            "limit": LIMIT_SECONDS,
        }
        answer, printed = trainings([*line, *arguments], place / f"output{count}", **request)
        return answer["statuses"][0], printed

    yield run
    trainings.close()


def problem(status: int | None, said: str, outcome: str) -> str | None:
    """The difference of a run's end from the table; None without one."""
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
