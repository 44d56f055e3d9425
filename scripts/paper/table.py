"""The paper's runs as one table: each run's difference from the base, and the paper's hardware, hours and results.

`recipes.py` starts them. A source is a folder under DATA and is named after its first part: `coco/train` is the source `coco`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Flags = Mapping[str, "str | None"]

SOURCES_14M = ("sbu", "vg", "cc3m", "cc12m")
IMAGENET: Flags = {"image-mean": "0.485 0.456 0.406", "image-std": "0.229 0.224 0.225"}
HALF: Flags = {"image-mean": "0.5 0.5 0.5", "image-std": "0.5 0.5 0.5"}

# Section 2.2 and A.9; warm-up, betas, epsilon and the parameter of the temperature from the paper's released code. "" is a
# switch, None removes a flag.
BASE: Flags = {
    "model": "zerovl-ViT-B-16-BERT-base",
    "pretrained-image": "",
    "aug-cfg": "scale=(0.6,1.0)",
    "auto-augment": "imagenet",
    "text-augment": "0.2",
    **IMAGENET,
    "epochs": "20",
    "lr": "1e-4",
    "lr-min": "1e-5",
    "wd": "1e-3",
    "beta1": "0.9",
    "beta2": "0.98",
    "eps": "1e-6",
    "warmup-share": "0.025",
    "ablate": "temperature-parameter",
    "precision": "amp",
    "workers": "8",
    "save-every-steps": "250",
    "loss-chunk": "1024",
    "dga-retain": "auto",
    # A.9's transform and count of captions: the log's numbers stand beside the paper's. Left out without --retrieval-data.
    "retrieval-transform": "paper",
    "retrieval-captions": "5",
}
DETACHED = "detached-gather temperature-parameter"
METHODS: Flags = {"sampling": "debiased", "coin-flip-mixup": ""}
# "Identical to pre-training's" except rate, length and batch (5.2); the floor is a tenth of the rate, as in pre-training.
FINETUNE: Flags = {**METHODS, "lr": "1e-5", "lr-min": "1e-6", "pretrained-image": None}
FINETUNE_CLIP: Flags = {**FINETUNE, "coin-flip-mixup": None}
FINETUNE_BASELINE: Flags = {**FINETUNE_CLIP, "ablate": DETACHED}
FINETUNE_288: Flags = {**FINETUNE, **HALF, "model": "zerovl-ViT-B-16-288-BERT-base"}

NOT_GIVEN = "not given"
ZERO_SHOT = "RSUM of COCO 5K / Flickr30K 1K, zero-shot"
FINE_TUNED = "RSUM of the set's test split, fine-tuned"
TOP_1 = "top-1 accuracy on ImageNet-1K, percent"
PROBE: Flags = {"way": "paper", "epochs": "90", "lr": "6.4", "wd": "0", "workers": "8"}


@dataclass(frozen=True)
class Recipe:
    """One run of the paper.

    Attributes:
        paper: where the paper reports it.
        result: the paper's number, in the unit of `metric`.
        hardware: the paper's.
        effective_batch: N over all GPUs and DGA steps.
        flags: those that differ from BASE (for a linear probe: all flags).
        time: the paper's.
        metric: what `result` measures.
        sources: folders under DATA that it trains on.
        samples: of the whole run, if the paper counts steps and not epochs.
        dga: whether K may exceed 1; False needs GPUs that hold the batch.
        needs: flags that have no default and must be given with --set.
        teachers: names of frozen models whose embeddings DATA/teacher holds (`zerovl teacher`, with `teacher_views` views).
        finetuned_on: the retrieval set under DATA on which the run is scored before and after.
        paper_row: the paper's recalls on that set in percent, and its RSUM.
        program: "training", or "linear-probe" for `zerovl linear-probe`, whose two sources are its training and test set; one
            source is a dataset that brings its split.
    """

    paper: str
    result: str
    hardware: str
    effective_batch: int
    flags: Flags = field(default_factory=dict)
    time: str = NOT_GIVEN
    metric: str = ZERO_SHOT
    sources: tuple[str, ...] = SOURCES_14M
    samples: int | None = None
    dga: bool = True
    needs: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    teacher_views: int = 4
    finetuned_on: str | None = None
    paper_row: Mapping[str, float] = field(default_factory=dict)
    program: str = "training"


def _finetune(
    set_name: str, steps: int, rsum: float, row: tuple[float, ...], flags: Flags, pretrained_on: str
) -> Recipe:
    names = ("image_to_text_R@1", "image_to_text_R@10", "text_to_image_R@1", "text_to_image_R@10")
    return Recipe(
        f"Table 10, pre-trained on {pretrained_on} and fine-tuned on {set_name} for {steps:,} steps",
        f"{rsum}",
        "8 V100",
        2048,
        flags,
        metric=FINE_TUNED,
        sources=(f"{set_name}/train",),
        samples=steps * 2048,
        needs=("init-from",),
        finetuned_on=set_name,
        paper_row={**dict(zip(names, row, strict=True)), "rsum": rsum},
    )


def _probe(paper: str, result: str, *sources: str, batch: int = 16384, metric: str = TOP_1) -> Recipe:
    return Recipe(
        paper, result, NOT_GIVEN, batch, PROBE, metric=metric, sources=sources, needs=("model",), program="linear-probe"
    )


def _probe_a7(name: str, result: str, clip: str, batch: int) -> Recipe:
    """A row of Table 12, where the paper does not say the batch: one that leaves a thousand steps or more."""
    paper = f"Table 12 (A.7), linear probe of ZeroVL on {name} (CLIP, our impl., on 8 and 128 V100: {clip}); the batch is ours"
    return _probe(paper, result, name, batch=batch, metric="top-1 accuracy, percent")


RECIPES: dict[str, Recipe] = {
    "train-14m": Recipe(
        "Table 7, TokenDrop",
        "424.8 / 535.5",
        "8 V100 32 GB",
        16384,
        {**METHODS, "token-drop": "0.25"},
        time="470 GPU hours",
    ),
    "train-100m": Recipe(
        "Table 9, ZeroVL with 100M web data",
        "442.1 / 546.5",
        "8 V100 32 GB",
        16384,
        {**METHODS, **HALF},  # section 5.1 does not mention TokenDrop
        sources=(*SOURCES_14M, "web"),
    ),
    # Tables 3 and 4, one method added in each row. The rows before "gradient reserved gather" detach the gather.
    "baseline": Recipe(
        "Table 3, baseline", "371.6 / 483.3", "8 V100", 1024, {"sampling": "random", "ablate": DETACHED}
    ),
    "debiased": Recipe(
        "Table 3, + debiased sampling",
        "392.3 / 510.1",
        "8 V100",
        1024,
        {"sampling": "debiased", "ablate": DETACHED},
    ),
    "mixup": Recipe("Table 3, + coin flipping mixup", "402.8 / 519.2", "8 V100", 1024, {**METHODS, "ablate": DETACHED}),
    "gather": Recipe(
        "Table 4, + gradient reserved gather", "415.0 / 524.1", "8 V100", 1024, METHODS, time="430 GPU hours"
    ),
    "batch-2048": Recipe("Table 4, batch 2,048", "418.0 / 527.5", "16 V100", 2048, METHODS),
    "batch-4096": Recipe("Table 4, batch 4,096", "425.9 / 531.7", "32 V100", 4096, METHODS),
    "batch-8192": Recipe("Table 4, batch 8,192", "424.4 / 531.8", "64 V100", 8192, METHODS, dga=False),
    "batch-16384": Recipe("Table 4, batch 16,384", "425.0 / 536.2", "128 V100", 16384, METHODS, dga=False),
    "dga-8": Recipe("Table 5, DGA 8 steps", "424.1 / 532.2", "8 V100", 8192, METHODS, time="600 GPU hours"),
    "dga-16": Recipe("Table 5, DGA 16 steps", "425.2 / 535.9", "8 V100", 16384, METHODS, time="680 GPU hours"),
    "no-replay": Recipe(
        "Table 6, DGA without the same random masks twice",
        "413.4 / 527.1",
        "8 V100",
        16384,
        {**METHODS, "ablate": "no-replay temperature-parameter", "dga-retain": "0"},  # every mask twice
    ),
    "auxiliary": Recipe(
        "Table 8, ViT-B/32 beside the frozen BERT of another run",
        "381.2 / 493.9",
        "8 V100",
        1024,
        {**METHODS, "model": "zerovl-ViT-B-32-BERT-base", "freeze": "text", "ablate": DETACHED},
        time="110 GPU hours",
        needs=("init-from",),
    ),
    "auxiliary-baseline": Recipe(
        "Table 8, baseline ViT-B/32",
        "379.5 / 494.1",
        "8 V100",
        1024,
        {**METHODS, "model": "zerovl-ViT-B-32-BERT-base", "ablate": DETACHED},
        time="240 GPU hours",
    ),
    "clip": Recipe("Table 9, CLIP (our impl.), batch 1,024", "392.5 / 518.4", "8 V100", 1024, {"sampling": "random"}),
    "clip-16384": Recipe(
        "Table 9, CLIP (our impl.), batch 16,384", "416.0 / 527.3", "128 V100", 16384, {"sampling": "random"}
    ),
    "sequential": Recipe(
        "Figure of A.4, sequential sampling with SBU last",
        "bars without numbers",
        NOT_GIVEN,
        1024,
        {"sampling": "sequential", "source-order": "cc12m::cc3m::vg::sbu"},
    ),
    "clusters": Recipe(
        "A.6, CC12M in 100 clusters as sources",
        "384.4 / 511.1 (random sampling: 370.8 / 502.5)",
        NOT_GIVEN,
        1024,
        {"sampling": "debiased"},
        sources=("cc12m-clusters",),
    ),
    "clusters-random": Recipe(
        "A.6, CC12M with random sampling",
        "370.8 / 502.5",
        NOT_GIVEN,
        1024,
        {"sampling": "random"},
        sources=("cc12m",),
    ),
    "context": Recipe(
        "A.5, CC3M in two halves as sources: long captions with a red frame, short ones without; debiased sampling",
        "239.5 / 367.5",
        NOT_GIVEN,
        1024,
        {"sampling": "debiased"},
        sources=("cc3m-long", "cc3m-short"),
    ),
    "context-random": Recipe(
        "A.5, the same halves of CC3M with random sampling",
        "211.8 / 328.0",
        NOT_GIVEN,
        1024,
        {"sampling": "random"},
        sources=("cc3m-long", "cc3m-short"),
    ),
    "finetune-coco": _finetune("coco", 5000, 485.0, (72.9, 95.9, 55.1, 88.6), FINETUNE, "14M"),
    "finetune-f30k": _finetune("f30k", 1000, 561.6, (91.7, 99.5, 79.2, 97.1), FINETUNE, "14M"),
    "finetune-coco-baseline": _finetune(
        "coco", 5000, 471.9, (69.1, 94.8, 51.9, 86.8), FINETUNE_BASELINE, "14M, baseline,"
    ),
    "finetune-f30k-baseline": _finetune(
        "f30k", 1000, 553.0, (90.1, 99.1, 75.1, 96.6), FINETUNE_BASELINE, "14M, baseline,"
    ),
    "finetune-coco-clip": _finetune(
        "coco", 5000, 473.8, (69.9, 94.9, 52.5, 87.0), FINETUNE_CLIP, "14M, CLIP on 8 V100,"
    ),
    "finetune-f30k-clip": _finetune(
        "f30k", 1000, 554.1, (90.4, 99.2, 75.6, 96.5), FINETUNE_CLIP, "14M, CLIP on 8 V100,"
    ),
    "finetune-coco-clip-16384": _finetune(
        "coco", 5000, 481.3, (71.7, 95.8, 54.0, 88.1), FINETUNE_CLIP, "14M, CLIP on 128 V100,"
    ),
    "finetune-f30k-clip-16384": _finetune(
        "f30k", 1000, 560.7, (91.1, 99.5, 78.5, 97.7), FINETUNE_CLIP, "14M, CLIP on 128 V100,"
    ),
    "finetune-coco-288": _finetune("coco", 5000, 500.5, (77.2, 97.1, 59.3, 90.2), FINETUNE_288, "100M, at 288 px,"),
    "finetune-f30k-288": _finetune("f30k", 1000, 573.6, (95.0, 100.0, 83.7, 98.6), FINETUNE_288, "100M, at 288 px,"),
    # After the paper: teachers whose embeddings are stored (docs/methods.md). A mixed sample has no embedding, so no mixup; the
    # teachers read captions as they are, so no word augmentation.
    "distill-14m": Recipe(
        "none of the paper's: Table 7's run taught by stored teachers, weight and temperature MobileCLIP's (CVPR 2024)",
        "not measured",
        NOT_GIVEN,
        16384,
        {
            "sampling": "debiased",
            "token-drop": "0.25",
            "text-augment": None,
            "distill-weight": "1.0",
            "distill-temperature": "0.01",
        },
        teachers=("ViT-L-14-quickgelu/openai", "ViT-L-14/datacomp_xl_s13b_b90k"),
    ),
    "datacompdr-12m": Recipe(
        "none of the paper's: MobileCLIP (CVPR 2024), ViT-B/16 on DataCompDR-12M, 30,000 steps",
        "61.7",
        "32 GPUs in the published script, 8 A100 in the text",
        8192,
        {
            **dict.fromkeys(("pretrained-image", "auto-augment", "text-augment", "image-mean", "image-std", "aug-cfg")),
            **dict.fromkeys(("lr-min", "eps", "beta1", "warmup-share", "ablate")),
            **dict.fromkeys(("retrieval-transform", "retrieval-captions")),  # scored as CLIP_benchmark does
            "model": "ViT-B-16",
            "sampling": "random",
            "teacher": "shards:768,768",
            "captions": "txt+syn.json:syn_text",
            "distill-weight": "1.0",
            "distill-temperature": "0.01",
            "lr": "1e-3",
            "wd": "0.2",
            "beta2": "0.95",
            "warmup": "1000",
            "grad-clip-norm": "1.0",
        },
        time="about a day on 8 A100",
        metric="zero-shot top-1 accuracy on ImageNet-1K, percent",
        sources=("datacompdr-12m",),
        samples=30_000 * 8192,
    ),
    "linear-probe": _probe("Table 11 (5.3), linear probe of ZeroVL", "80.9", "imagenet/train", "imagenet/val"),
    "linear-probe-clip": _probe(
        "Table 11 (5.3), linear probe of CLIP (our impl.), 8 V100", "75.9", "imagenet/train", "imagenet/val"
    ),
    "linear-probe-clip-16384": _probe(
        "Table 11 (5.3), linear probe of CLIP (our impl.), 128 V100", "80.0", "imagenet/train", "imagenet/val"
    ),
    "linear-probe-cub": _probe_a7("cub", "75.7", "61.9, 75.0", 512),
    "linear-probe-food101": _probe_a7("food101", "90.9", "84.3, 88.5", 4096),
    "linear-probe-pets": _probe_a7("pets", "92.0", "85.9, 89.9", 256),
    "linear-probe-aircraft": _probe_a7("aircraft", "52.1", "50.0, 51.3", 512),
    "linear-probe-inat17": _probe_a7("inat17", "54.3", "43.7, 53.4", 16384),
    "linear-probe-places365": _probe_a7("places365", "55.8", "53.6, 54.0", 16384),
}


def find_recipe(name: str) -> str | None:
    """A recipe's name with or without the make targets' `train-`: "train-debiased" is `debiased`. None if there is none."""
    return next((known for known in (name, name.removeprefix("train-"), f"train-{name}") if known in RECIPES), None)


def described(name: str) -> str:
    """A recipe as a few lines: paper, metric, hardware, time, data, batch, what differs from the base, command."""
    recipe = RECIPES[name]
    given = [f"--{flag}" + (f" {value}" if value else "") for flag, value in recipe.flags.items() if value is not None]
    removed = [f"no --{flag}" for flag, value in recipe.flags.items() if value is None]
    needed = "".join(f" ARGS='--set {flag}=...'" for flag in recipe.needs[:1])
    target = name if name.startswith(("train-", "finetune-")) else f"train-{name}"
    length = f"{recipe.samples // recipe.effective_batch:,} steps of " if recipe.samples else ""
    lines = {
        "paper": recipe.paper,
        "metric": f"{recipe.metric}: {recipe.result}",
        "hardware": recipe.hardware,
        "time": recipe.time,
        "data": " ".join(f"DATA/{source}" for source in recipe.sources),
        **({"teachers": f"{', '.join(recipe.teachers)}: their embeddings in DATA/teacher"} if recipe.teachers else {}),
        "batch": f"{length}{recipe.effective_batch:,}" + ("" if recipe.dga else ", without DGA"),
        "flags": ", ".join([*given, *removed]),
        "command": f"make {target} DATA=DIR{needed}",
    }
    return "\n".join([name, *(f"  {key:9} {value}" for key, value in lines.items())])
