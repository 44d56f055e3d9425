"""The paper's runs as one table, and the launcher of `make train-14m` and the others.

    python scripts/recipes.py train-14m --data /data [--dry-run] [--set lr=5e-5 ...]
    python scripts/recipes.py --list

A recipe is a row of RECIPES: which table of the paper, what differs from the base, what the paper reports for it. The
launcher finds the GPUs, chooses micro-batch and DGA steps so that the effective batch is the recipe's on what is there, and
starts torchrun here or submits scripts/train.sbatch where there is SLURM. Runs save step checkpoints and resume exactly.

DATA holds one folder of webdataset shards a source: DATA/sbu, DATA/vg, DATA/cc3m, DATA/cc12m (and DATA/web for 100M),
retrieval sets in DATA/coco-test and DATA/f30k-test, training sets for fine-tuning in DATA/coco and DATA/f30k.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES_14M = ("sbu", "vg", "cc3m", "cc12m")
IMAGENET = {"image-mean": "0.485 0.456 0.406", "image-std": "0.229 0.224 0.225"}
HALF = {"image-mean": "0.5 0.5 0.5", "image-std": "0.5 0.5 0.5"}

# Section 2.2 and A.9; warm-up, betas and epsilon from the paper's released code. Values "" are switches, None removes a flag.
BASE: dict[str, str | None] = {
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
    "precision": "amp",
    "workers": "8",
    "save-every-steps": "250",
    "loss-chunk": "1024",
}
DATA_METHODS: dict[str, str | None] = {"sampling": "debiased", "coin-flip-mixup": ""}
FINETUNE: dict[str, str | None] = {"sampling": "debiased", "lr": "1e-5", "lr-min": "1e-6", "pretrained-image": None}


@dataclass(frozen=True)
class Recipe:
    """One run of the paper.

    Attributes:
        paper: where the paper reports it, with its RSUM on COCO 5K / Flickr30K 1K (zero-shot unless said).
        hardware: what the paper ran it on, and how long ("not given" where the paper does not say).
        effective_batch: N over all GPUs and DGA steps.
        flags: what differs from BASE.
        sources: folders under DATA that it trains on.
        samples: of the whole run, where the paper counts steps and not epochs.
        dga: whether K may exceed 1; False asks for GPUs that hold the batch.
        needs: other settings that must be given with --set.
    """

    paper: str
    hardware: str
    effective_batch: int
    flags: dict[str, str | None] = field(default_factory=dict)
    sources: tuple[str, ...] = SOURCES_14M
    samples: int | None = None
    dga: bool = True
    needs: tuple[str, ...] = ()


RECIPES: dict[str, Recipe] = {
    "train-14m": Recipe(
        "Table 7, TokenDrop: 424.8 / 535.5",
        "8 V100 32 GB, 470 GPU hours",
        16384,
        {**DATA_METHODS, "token-drop": "0.25"},
    ),
    "train-100m": Recipe(
        "Table 9, ZeroVL with 100M web data: 442.1 / 546.5",
        "8 V100 32 GB, not given",
        16384,
        {**DATA_METHODS, **HALF, "token-drop": "0.25"},
        (*SOURCES_14M, "web"),
    ),
    # Table 3 and 4: the ladder. Rows before "gradient reserved gather" detach the gather.
    "baseline": Recipe(
        "Table 3, baseline: 371.6 / 483.3",
        "8 V100, not given",
        1024,
        {"sampling": "random", "ablate": "detached-gather"},
    ),
    "debiased": Recipe(
        "Table 3, + debiased sampling: 392.3 / 510.1",
        "8 V100, not given",
        1024,
        {"sampling": "debiased", "ablate": "detached-gather"},
    ),
    "mixup": Recipe(
        "Table 3, + coin flipping mixup: 402.8 / 519.2",
        "8 V100, not given",
        1024,
        {**DATA_METHODS, "ablate": "detached-gather"},
    ),
    "gather": Recipe("Table 4, + gradient reserved gather: 415.0 / 524.1", "8 V100, 430 GPU hours", 1024, DATA_METHODS),
    "batch-2048": Recipe("Table 4, batch 2,048: 418.0 / 527.5", "16 V100, not given", 2048, DATA_METHODS),
    "batch-4096": Recipe("Table 4, batch 4,096: 425.9 / 531.7", "32 V100, not given", 4096, DATA_METHODS),
    "batch-8192": Recipe("Table 4, batch 8,192: 424.4 / 531.8", "64 V100, not given", 8192, DATA_METHODS, dga=False),
    "batch-16384": Recipe(
        "Table 4, batch 16,384: 425.0 / 536.2", "128 V100, not given", 16384, DATA_METHODS, dga=False
    ),
    "dga-8": Recipe("Table 5, DGA 8 steps: 424.1 / 532.2", "8 V100, 600 GPU hours", 8192, DATA_METHODS),
    "dga-16": Recipe("Table 5, DGA 16 steps: 425.2 / 535.9", "8 V100, 680 GPU hours", 16384, DATA_METHODS),
    "no-replay": Recipe(
        "Table 6, not stable: 413.4 / 527.1", "8 V100, 680 GPU hours", 16384, {**DATA_METHODS, "ablate": "no-replay"}
    ),
    "auxiliary": Recipe(
        "Table 8, auxiliary ViT-B/32 beside a frozen BERT: 381.2 / 493.9",
        "8 V100, 110 GPU hours",
        1024,
        {**DATA_METHODS, "model": "zerovl-ViT-B-32-BERT-base", "freeze": "text", "ablate": "detached-gather"},
        needs=("init-from",),
    ),
    "auxiliary-baseline": Recipe(
        "Table 8, baseline ViT-B/32: 379.5 / 494.1",
        "8 V100, 240 GPU hours",
        1024,
        {**DATA_METHODS, "model": "zerovl-ViT-B-32-BERT-base", "ablate": "detached-gather"},
    ),
    "clip": Recipe(
        "Table 9, CLIP (our impl.), batch 1,024: 392.5 / 518.4", "8 V100, not given", 1024, {"sampling": "random"}
    ),
    "clip-16384": Recipe(
        "Table 9, CLIP (our impl.), batch 16,384: 416.0 / 527.3", "128 V100, not given", 16384, {"sampling": "random"}
    ),
    "sequential": Recipe(
        "Figure of A.4, sequential sampling with SBU last (bars, no numbers)",
        "not given",
        1024,
        {"sampling": "sequential", "source-order": "cc12m::cc3m::vg::sbu"},
    ),
    "clusters": Recipe(
        "A.6, CC12M in 100 clusters as sources: 384.4 / 511.1 (random: 370.8 / 502.5)",
        "not given",
        1024,
        {"sampling": "debiased"},
        ("cc12m-clusters",),
    ),
    "finetune-coco": Recipe(
        "Table 10, fine-tuned on COCO, 5,000 steps: 485.0",
        "8 V100, not given",
        2048,
        FINETUNE,
        ("coco",),
        samples=5000 * 2048,
        needs=("init-from",),
    ),
    "finetune-f30k": Recipe(
        "Table 10, fine-tuned on Flickr30K, 1,000 steps: 561.6",
        "8 V100, not given",
        2048,
        FINETUNE,
        ("f30k",),
        samples=1000 * 2048,
        needs=("init-from",),
    ),
}


@dataclass(frozen=True)
class Hardware:
    """What a run is started on: GPUs of one node (0 = train on the CPU), memory of each in GiB, nodes."""

    gpus: int
    memory_gib: float
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return max(1, self.gpus) * self.nodes


def find_hardware(nodes: int) -> Hardware:
    """The GPUs that nvidia-smi lists here (respecting CUDA_VISIBLE_DEVICES), and their smallest memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return Hardware(0, 0, nodes)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    memories = [float(line) / 1024 for line in done.stdout.split() if done.returncode == 0]
    count = len(visible.split(",")) if visible else len(memories)
    return Hardware(min(count, len(memories)), min(memories, default=0), nodes)


def micro_batch_of(hardware: Hardware) -> int:
    """A micro-batch per GPU that fits ViT-B/16 + BERT-base with mixed precision: the paper's 128 on 32 GB, in proportion
    to the memory and rounded down to a power of two; 16 on a CPU. `zerovl plan` measures what really fits."""
    return 2 ** int(math.log2(4 * hardware.memory_gib)) if hardware.gpus else 16


def command_of(name: str, data: Path, hardware: Hardware, settings: dict[str, str | None]) -> list[str]:
    """The training arguments of a recipe on this hardware.

    Raises:
        SystemExit: a sentence on what is missing or does not divide.
    """
    recipe = RECIPES[name]
    flags = {**BASE, **recipe.flags, **settings}
    missing = [need for need in recipe.needs if not flags.get(need)]
    if missing:
        raise SystemExit(f"recipes.py: {name} needs --set {missing[0]}=... ({recipe.paper})")
    target = int(flags.pop("effective-batch", None) or recipe.effective_batch)
    micro_batch = int(flags.pop("batch-size", None) or min(micro_batch_of(hardware), max(1, target // hardware.ranks)))
    steps = max(1, round(target / (micro_batch * hardware.ranks)))
    if steps > 1 and not recipe.dga:
        raise SystemExit(
            f"recipes.py: {name} is the paper's run without DGA and needs {target // micro_batch} GPUs of this size, "
            f"{hardware.ranks} are there; take dga-8 or dga-16, which give the same batch"
        )
    reached = micro_batch * steps * hardware.ranks
    if reached != target:
        print(
            f"recipes.py: the effective batch is {reached} in place of {target} "
            f"({hardware.ranks} ranks x {micro_batch} x {steps})"
        )
    if not hardware.gpus:
        flags.update({"device": "cpu", "precision": settings.get("precision") or "fp32"})
        flags["workers"] = settings.get("workers") or "1"
    folders = {source: data / source for source in recipe.sources}
    if recipe.sources == ("cc12m-clusters",):
        folders = {folder.name: folder for folder in sorted((data / "cc12m-clusters").glob("*")) if folder.is_dir()}
    absent = [folder for folder in folders.values() if not folder.is_dir()]
    if absent or not folders:
        where = absent[0] if absent else data / recipe.sources[0]
        raise SystemExit(
            f"recipes.py: {name} needs the shards of {where}, which is not there; docs/data.md tells how to get it"
        )
    arguments = ["--train-data", "::".join(f"{source}={folder}" for source, folder in folders.items())]
    retrieval = [f"{set_}={data / f'{set_}-test'}" for set_ in ("coco", "f30k") if (data / f"{set_}-test").is_dir()]
    if retrieval and "retrieval-data" not in flags:
        arguments += ["--retrieval-data", "::".join(retrieval)]
    if recipe.samples is not None and "train-num-samples" not in flags:
        flags.update({"train-num-samples": str(recipe.samples), "epochs": "1"})
    arguments += ["--batch-size", str(micro_batch), "--dga-steps", str(steps)]
    flags.setdefault("name", name)
    for flag, value in flags.items():
        if value is not None:
            arguments += [
                f"--{flag}",
                *(shlex.split(value) if flag in ("aug-cfg", "image-mean", "image-std") else [value] * bool(value)),
            ]
    if "resume" not in flags:
        arguments += ["--resume", "latest"]
    return arguments


def launch_line(arguments: list[str], hardware: Hardware) -> list[str]:
    """torchrun on the GPUs of this machine, or plain Python for one process."""
    if hardware.ranks == 1:
        return [sys.executable, "-m", "training.main", *arguments]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={max(1, hardware.gpus)}",
        "-m", "training.main", "--", *arguments,
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=sorted(RECIPES), metavar="RECIPE")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sources (or $DATA)")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument(
        "--dry-run", action="store_true", default=bool(os.environ.get("DRY_RUN")), help="print what would run"
    )
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("NODES", "1")), help="SLURM nodes")
    parser.add_argument("--gpus", type=int, help="GPUs a node, in place of those found here (SLURM, dry runs)")
    parser.add_argument("--gpu-memory", type=float, help="GiB of each, likewise")
    parser.add_argument("--no-slurm", action="store_true", help="start here even where sbatch is installed")
    parser.add_argument(
        "--arguments-only", action="store_true", help="print the training arguments (scripts/train.sbatch)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="set or replace a training flag; FLAG= removes it",
    )
    options = parser.parse_args()
    if options.list or options.recipe is None:
        for name, recipe in RECIPES.items():
            print(f"{name:20} {recipe.paper}  [{recipe.hardware}]")
        return 0
    if options.data is None:
        parser.error("give --data DIR, the folder that holds one folder of shards a source")
    found = find_hardware(options.nodes)
    gpus = found.gpus if options.gpus is None else options.gpus
    hardware = Hardware(gpus, options.gpu_memory or found.memory_gib or (32.0 if gpus else 0.0), options.nodes)
    settings: dict[str, str | None] = {}
    for setting in options.set:
        flag, separator, value = setting.partition("=")
        settings[flag] = value if value or not separator else None
    arguments = command_of(options.recipe, Path(options.data).absolute(), hardware, settings)
    if options.arguments_only:
        print(shlex.join(arguments))
        return 0
    if shutil.which("sbatch") and not options.no_slurm and "SLURM_JOB_ID" not in os.environ:
        line = [
            "sbatch", f"--nodes={hardware.nodes}", f"--job-name={options.recipe}",
            *([f"--gres=gpu:{hardware.gpus}"] if hardware.gpus else []),
            str(ROOT / "scripts" / "train.sbatch"), *arguments,
        ]  # fmt: skip
    else:
        line = launch_line(arguments, hardware)
    recipe = RECIPES[options.recipe]
    print(f"{options.recipe}: {recipe.paper}; the paper: {recipe.hardware}", flush=True)
    print(shlex.join(line), flush=True)
    return 0 if options.dry_run else subprocess.run(line, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
