"""Start one of the paper's runs (recipes.yaml) on this machine or its SLURM cluster; `make train-14m` and the like call it.

    python -m scripts.paper.recipes train-14m --data /data [--dry-run] [--set lr=5e-5 ...]
    python -m scripts.paper.recipes train-14m --data /data --plan
    python -m scripts.paper.recipes --list | NAME --describe

Finds the GPUs, chooses micro-batch and DGA steps so that the effective batch is the recipe's, and becomes the training program
or submits train.sbatch on SLURM. Runs save step checkpoints; the same command resumes a stopped run exactly.

DATA holds the output of `zerovl data NAME --out DATA/NAME`: for each source a folder of webdataset shards (sbu, vg, cc3m,
cc12m, and web for 100M), and the retrieval sets coco and f30k, with their train/ for fine-tuning
(docs/recipes.md).
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A

import yaml

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import CPU_MICRO_BATCH, gpu_memories, training_command
from open_clip_zerovl.recipe.flags import Settings, as_arguments, parse_settings
from scripts.program import program

USABLE_SHARE = 0.83  # of a GPU's memory, for graphs and all else of a step
PAPER_GPU_GIB = 32.0  # V100
# Bytes of a step in bf16 autocast, counted by `plan.estimate.count_costs` of commit 3c8fd466: (model, token drop, frozen tower)
# -> MiB of a graph for each sample, and GiB of weights, optimizer, gradients and half-precision copies.
GRAPHS: dict[tuple[str, str | None, str | None], tuple[float, float]] = {
    ("zerovl-ViT-B-16-BERT-base", None, None): (74.9, 3.24),
    ("zerovl-ViT-B-16-BERT-base", "0.25", None): (59.8, 3.24),
    ("zerovl-ViT-B-32-BERT-base", None, None): (28.3, 3.27),
    ("zerovl-ViT-B-32-BERT-base", None, "text"): (16.2, 1.89),
    ("zerovl-ViT-B-16-288-BERT-base", None, None): (105.2, 3.24),
}

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "scripts" / "paper" / "train.sbatch"
RETRIEVAL_SETS = ("coco", "f30k")
FIVE_CAPTIONS = ("vg", "coco/train", "f30k/train")  # a picture; each is shown once an epoch


NOT_GIVEN = "not given"
MEASURED = ("I2T R@1", "I2T R@10", "T2I R@1", "T2I R@10")


@dataclass(frozen=True)
class Recipe:
    """One run of the paper.

    Attributes:
        paper: where the paper reports it.
        result: the paper's number, in the unit of `metric`.
        effective_batch: N over all GPUs and DGA steps.
        flags: those that differ from BASE (for a linear probe: all flags).
        hardware, time: the paper's.
        metric: what `result` measures.
        sources: folders under DATA that it trains on.
        samples: samples of the whole run, if the paper counts steps and not epochs.
        dga: whether K may exceed 1; False needs GPUs that hold the batch.
        needs: flags that have no default and must be given with --set.
        finetuned_on: the retrieval set under DATA on which the run is scored.
        recalls: the paper's on that set in percent, in the order of `MEASURED`.
        program: "training", or "linear-probe" for `scripts.paper.probe`, whose two sources are its training and test set; one
            source is a dataset that brings its split.
    """

    paper: str
    result: str
    effective_batch: int
    flags: Mapping[str, str | None] = field(default_factory=dict)
    hardware: str = NOT_GIVEN
    time: str = NOT_GIVEN
    metric: str = "RSUM of COCO 5K / Flickr30K 1K, zero-shot"
    sources: Sequence[str] = ("sbu", "vg", "cc3m", "cc12m")
    samples: int | None = None
    dga: bool = True
    needs: Sequence[str] = ()
    finetuned_on: str | None = None
    recalls: Sequence[float] = ()
    program: str = "training"


_TABLE = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
BASE: Mapping[str, str | None] = _TABLE["base"]
RECIPES = {name: Recipe(**one) for name, one in _TABLE["recipes"].items()}


@dataclass(frozen=True)
class Hardware:
    """The machines of a run.

    Attributes:
        gpus: GPUs of one node; 0 trains on the CPU.
        memory_gib: memory of the smallest GPU.
        nodes: in the job.
        processes: ranks of a node without GPUs.
    """

    gpus: int
    memory_gib: float
    nodes: int = 1
    processes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return self.gpus or self.processes

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes


def find_recipe(name: str) -> str | None:
    """Find a recipe by its name with or without the make targets' `train-`: "train-debiased" is `debiased`.

    Returns:
        None if there is none.
    """
    return next(
        (
            known
            for known in (name, name.removeprefix("train-"), f"train-{name}")
            if known in RECIPES
        ),
        None,
    )


def described(name: str) -> str:
    """Describe a recipe in a few lines: paper, metric, hardware, time, data, batch, differences from the base, command."""
    recipe = RECIPES[name]
    given = [
        f"--{flag}" + (f" {value}" if value else "")
        for flag, value in recipe.flags.items()
        if value is not None
    ]
    removed = [f"no --{flag}" for flag, value in recipe.flags.items() if value is None]
    needed = "".join(f" ARGS='--set {flag}=...'" for flag in recipe.needs[:1])
    target = name if name.startswith(("train-", "finetune-")) else f"train-{name}"
    length = f"{recipe.samples // recipe.effective_batch:,} steps of " if recipe.samples else ""
    recalls = ", ".join(
        f"{kind} {value}" for kind, value in zip(MEASURED, recipe.recalls, strict=False)
    )
    lines = {
        "paper": recipe.paper,
        "metric": f"{recipe.metric}: {recipe.result}" + (f" ({recalls})" if recalls else ""),
        "hardware": recipe.hardware,
        "time": recipe.time,
        "data": " ".join(f"DATA/{source}" for source in recipe.sources),
        "batch": f"{length}{recipe.effective_batch:,}" + ("" if recipe.dga else ", without DGA"),
        "flags": ", ".join([*given, *removed]),
        "command": f"make {target} DATA=DIR{needed}",
    }
    return "\n".join([name, *(f"  {key:9} {value}" for key, value in lines.items())])


def batching_of(recipe: Recipe, hardware: Hardware, settings: Settings) -> tuple[int, int]:
    """Choose micro-batch B and DGA steps K, so that B*K*ranks is the recipe's effective batch or as near as B*ranks allows.

    Raises:
        UserError: a run without DGA on GPUs that do not hold its batch.
    """
    target = int(settings.get("effective-batch") or recipe.effective_batch)
    fits = (
        micro_batch_that_fits(recipe, hardware.memory_gib, settings)
        if hardware.gpus
        else CPU_MICRO_BATCH
    )
    micro_batch = int(settings.get("batch-size") or min(fits, max(1, target // hardware.ranks)))
    steps = max(1, round(target / (micro_batch * hardware.ranks)))
    if steps > 1 and not recipe.dga:
        raise UserError(
            f"the paper ran this without DGA; that needs {-(-target // micro_batch)} GPUs of this size, but there "
            f"are {hardware.ranks}: take dga-8 or dga-16, which give the same batch"
        )
    if (reached := micro_batch * steps * hardware.ranks) != target:
        print(
            f"the effective batch is {reached} instead of {target} "
            f"({hardware.ranks} ranks x {micro_batch} x {steps})",
            file=sys.stderr,
        )
    return micro_batch, steps


def micro_batch_that_fits(recipe: Recipe, memory_gib: float, settings: Settings) -> int:
    """Return the largest power of two of which two graphs fit, so that a run fits if graphs are larger than counted.

    Models whose graphs were not counted are taken for the largest.
    """
    if memory_gib <= 0:
        raise UserError(f"a GPU cannot have {memory_gib:g} GiB of memory; give its memory in GiB")
    flags = {**BASE, **recipe.flags, **settings}
    key = flags["model"] or "", flags.get("token-drop"), flags.get("freeze")
    sample_mib, fixed_gib = GRAPHS.get(key, max(GRAPHS.values()))
    room_mib = 1024 * (USABLE_SHARE * memory_gib - fixed_gib)
    return 2 ** math.floor(math.log2(max(1, room_mib / (2 * sample_mib))))


def data_flags(recipe: Recipe, data: Path) -> Settings:
    """Name the recipe's sources for --train-data, and the sets that exist for --retrieval-data."""
    named = []
    for source in recipe.sources:
        clusters = data / source / "train-data.txt"  # written by scripts.paper.cluster
        name = f"{source.split('/')[0]}={data / source}"
        named.append(clusters.read_text("utf-8").strip() if clusters.is_file() else name)
    flags: Settings = {"train-data": "::".join(named)}
    if five := [source.split("/")[0] for source in recipe.sources if source in FIVE_CAPTIONS]:
        flags["train-data-upsampling-factors"] = "::".join(f"{name}=5" for name in five)
    sets = [recipe.finetuned_on] if recipe.finetuned_on else RETRIEVAL_SETS
    if there := [f"{name}={data / name}" for name in sets if (data / name / "test").is_dir()]:
        flags["retrieval-data"] = "::".join(there)
    return flags


def missing_for(recipe: Recipe, data: Path, settings: Settings) -> str:
    """Name the flag, or the folders under DATA, that the recipe lacks in a sentence, an empty one if it can start."""
    for need in recipe.needs:
        if not settings.get(need):
            return f"give --set {need}=... ({recipe.paper})"
    if recipe.program == "training" and "train-data" in settings:
        return ""
    folders = [data / source for source in recipe.sources]
    if recipe.finetuned_on and "retrieval-data" not in settings:
        folders.append(data / recipe.finetuned_on / "test")
    absent = [str(folder) for folder in folders if not folder.is_dir()]
    empty = [
        str(folder)
        for folder in folders
        if folder.is_dir()
        and not any(e.suffix in (".tar", ".csv", ".tsv") or e.is_dir() for e in folder.iterdir())
    ]
    said = []
    if absent:
        said.append(f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not there")
    if empty:
        said.append(f"{', '.join(empty)} {'holds' if len(empty) == 1 else 'hold'} no data")
    if said:
        said.append("docs/datasets.md says how to make it (--data or DATA= names its folder)")
    return "; ".join(said)


def training_flags(
    recipe: Recipe, name: str, data: Path, hardware: Hardware, settings: Settings
) -> Settings:
    """Collect the flags of training.main for a recipe, without those of its batch."""
    flags: Settings = {
        **data_flags(recipe, data),
        **BASE,
        **recipe.flags,
        "name": name,
        "resume": "latest",
    }
    if recipe.samples is not None:
        flags.update({"train-num-samples": str(recipe.samples), "epochs": "1"})
    if not hardware.gpus:
        flags.update({"device": "cpu", "precision": "fp32", "workers": "1"})
        flags.pop("torchcompile", None)  # measured on a GPU alone
    flags.update(settings)
    if flags.get("retrieval-data") is None:  # also where --set has removed it
        flags = {flag: value for flag, value in flags.items() if not flag.startswith("retrieval-")}
    for flag in ("effective-batch", "batch-size"):
        flags.pop(flag, None)
    return flags


def probe_line(
    recipe: Recipe, name: str, data: Path, hardware: Hardware, settings: Settings
) -> list[str]:
    """Write the command of `scripts.paper.probe` for a recipe, whose checkpoint `--set model=` names."""
    specs = [str(data / source) for source in recipe.sources]
    if len(specs) == 1:  # a dataset that brings its split
        specs = [f"{recipe.sources[0]}:{specs[0]}"] * 2
    flags: Settings = {"train": specs[0], "test": specs[1], "out": f"logs/{name}", **recipe.flags}
    flags |= {
        "batch-size": str(recipe.effective_batch),
        **({"amp": ""} if hardware.gpus else {}),
        **settings,
    }
    model = flags.pop("model", None) or "MODEL"
    return [
        sys.executable,
        "-m",
        "scripts.paper.probe",
        model,
        *as_arguments(flags),
    ]


def sbatch_line(
    name: str, hardware: Hardware, arguments: Sequence[str], options: Sequence[str]
) -> list[str]:
    """Write the command that submits the run to SLURM, with further `options` for sbatch."""
    return [
        "sbatch", f"--nodes={hardware.nodes}", f"--job-name={name}",
        *([f"--gres=gpu:{hardware.gpus}"] if hardware.gpus else []), *options,
        str(SBATCH), "--ranks", str(hardware.ranks_per_node), "--", *arguments,
    ]  # fmt: skip


def submits(hardware: Hardware, *, known: bool, dry_run: bool, here: bool) -> bool:
    """Return whether the run goes to SLURM, as a dry run on several nodes does even without sbatch.

    Args:
        known: whether the GPUs of a node were given.
        here: trains on this machine even if sbatch is installed.

    Raises:
        UserError: the GPUs of a SLURM node are not known; several nodes without SLURM.
    """
    if shutil.which("sbatch") and not here and "SLURM_JOB_ID" not in os.environ:
        if not hardware.gpus and not known:
            raise UserError(
                "this machine has no GPUs, so those of a SLURM node are not known: give --gpus 8 --gpu-memory 32 "
                "or the like (--gpus 0 trains on CPUs, --no-slurm on this machine)"
            )
        return True
    if hardware.nodes > 1 and dry_run and not here:
        return True
    if hardware.nodes > 1:
        raise UserError(f"--nodes {hardware.nodes} needs SLURM: sbatch, and no --no-slurm")
    return False


def run_line(name: str, line: list[str], *, dry_run: bool) -> None:
    """Print the recipe and one command, and become it unless it is a dry run."""
    recipe = RECIPES[name]
    print(
        f"{name}: {recipe.paper}: {recipe.result}; the paper: {recipe.hardware}, time {recipe.time}"
    )
    print(shlex.join(line), flush=True)
    if not dry_run:
        os.chdir(ROOT)
        os.execvpe(line[0], line, {**os.environ, "PYTHON": sys.executable})


def start(
    recipe: A[str, "a name of --list, with or without train-", "RECIPE"] = "",
    /,
    *,
    list: A[bool, "list the recipes"] = False,
    describe: A[bool, "print the recipe and start nothing"] = False,
    data: A[Path | None, "default: $DATA, or data/"] = None,
    set: A[
        tuple[str, ...],
        "set or replace a flag of training; FLAG alone sets a switch, FLAG= removes a flag",
        "FLAG=VALUE",
    ] = (),
    dry_run: A[bool, "only print"] = False,
    plan: A[bool, "zerovl plan: two steps, and the time and memory of the run"] = False,
    gpus: A[int | None, "GPUs a node (default: those of this machine); 0 trains on the CPU"] = None,
    gpu_memory: A[float | None, "memory of each GPU (default: as found here)", "GIB"] = None,
    processes: A[int, "ranks of a node without GPUs"] = 1,
    nodes: A[int | None, "SLURM nodes (default: $NODES, or 1)"] = None,
    sbatch: A[tuple[str, ...], "an option for sbatch: --sbatch=--partition=gpu", "OPTION"] = (),
    no_slurm: A[bool, "start on this machine even if sbatch is installed"] = False,
) -> None:
    """Start a run of the paper."""
    if list or not recipe:
        for each, listed in RECIPES.items():
            print(f"{each:20} {listed.paper}: {listed.result}  [{listed.hardware}; {listed.time}]")
        return
    name = find_recipe(recipe)
    if name is None:
        raise UserError(f"there is no recipe {recipe!r}; --list shows them")
    if describe:
        print(described(name))
        return

    chosen, settings = RECIPES[name], parse_settings(set)
    data = Path(data or os.environ.get("DATA") or "data").absolute()
    dry_run = dry_run or bool(os.environ.get("DRY_RUN"))
    memories = gpu_memories()
    hardware = Hardware(
        len(memories) if gpus is None else gpus,
        gpu_memory or min(memories, default=0.0) or PAPER_GPU_GIB,
        nodes or int(os.environ.get("NODES") or "1"),
        processes,
    )
    if missing := missing_for(chosen, data, settings):
        if not dry_run:
            raise UserError(f"{name}: {missing}")
        print(f"{name}: missing: {missing}", file=sys.stderr)
    if chosen.program == "linear-probe":
        if plan:
            raise UserError("zerovl plan plans trainings only, and this recipe is a linear probe")
        run_line(name, probe_line(chosen, name, data, hardware, settings), dry_run=dry_run)
        return
    flags = training_flags(chosen, name, data, hardware, settings)
    micro_batch, dga_steps = batching_of(chosen, hardware, settings)
    batch: Settings = {"batch-size": str(micro_batch), "dga-steps": str(dga_steps)}
    arguments = as_arguments({**batch, **flags})
    if settings:  # a mistake is reported before a job waits; tests check the table's own flags
        from training.params import parse

        parse(arguments)
    if plan:
        line = [sys.executable, "-m", "open_clip_zerovl.cli", "plan", *arguments]
    elif submits(hardware, known=gpus is not None, dry_run=dry_run, here=no_slurm):
        line = sbatch_line(name, hardware, arguments, sbatch)
    else:
        line = training_command(arguments, hardware.ranks_per_node)
    run_line(name, line, dry_run=dry_run)


if __name__ == "__main__":
    sys.exit(program(start))
