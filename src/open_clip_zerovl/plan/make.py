"""Making a plan: data is opened, the model is built, bytes and FLOPs of a step are counted, and its time is found.

For this machine a few real steps are taken (measure.py). For other hardware a table of GPUs and one utilisation give the time
(estimate.py, gpus.py).
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import free_space
from open_clip_zerovl.core.launch import CPU_MICRO_BATCH
from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.dga.retain import AUTO_SHARE
from open_clip_zerovl.losses.names import heads_batch
from open_clip_zerovl.models.local_dir import no_code_from_data
from open_clip_zerovl.plan.batching import PlanSettings, choose_batching
from open_clip_zerovl.plan.data_check import DataCheck, check_data, schedule_steps
from open_clip_zerovl.plan.estimate import UTILISATION, Costs, count_costs
from open_clip_zerovl.plan.gpus import GIB, USABLE_SHARE, graphs_room, parse_hardware
from open_clip_zerovl.plan.measure import CPU_STEP_FLOPS, LARGEST_K, StepTime, measure_step
from open_clip_zerovl.plan.model import build, is_file_name, quiet, weights_to_fetch
from open_clip_zerovl.recipe.step import precision_on
from open_clip_zerovl.recipe.towers import group_of
from open_clip_zerovl.sampling.schedule import Batching


@dataclass(frozen=True)
class Hardware:
    """The hardware that the run is planned for.

    Attributes:
        name: name of one device.
        kind: "cuda", "cpu", or "assumed".
        ranks: W, one rank a GPU, or one on the CPU.
        memory_gib: memory of one GPU, or of the machine for a CPU.
        free_gib: free memory (all of it for assumed hardware).
        cores: CPU cores that this process may use; None for assumed hardware.
    """

    name: str
    kind: str
    ranks: int
    memory_gib: float
    free_gib: float
    cores: int | None = None

    @property
    def room_bytes(self) -> float:
        """Memory of one device that a step may take."""
        return (AUTO_SHARE * self.free_gib if self.cores else USABLE_SHARE * self.memory_gib) * GIB


@dataclass
class Plan:
    """The result of `zerovl plan`.

    Attributes:
        data: sources and sets, missing things, notes.
        parameters: number of all parameters, and of the trained ones.
        retained: R, graphs kept in a step.
        compute_seconds: seconds of an optimizer step of one rank, without waiting for data.
        data_seconds: the wait for its data; 0 where no step was taken here.
        timed: the step that was taken here.
        free_disk_bytes: free space of --logs, None for assumed hardware.
    """

    settings: PlanSettings
    hardware: Hardware
    data: DataCheck
    costs: Costs
    batching: Batching
    parameters: tuple[int, int]
    retained: int
    compute_seconds: float = 0.0
    data_seconds: float = 0.0
    timed: StepTime | None = None
    free_disk_bytes: int | None = None

    @property
    def estimate(self) -> bool:
        """True if the plan is for other hardware, on which nothing was measured."""
        return self.hardware.kind == "assumed"

    @property
    def peak_bytes(self) -> float:
        """Memory of a step on one device, counted."""
        return self.costs.peak_bytes(self.batching, self.retained)

    @property
    def sample_flops(self) -> float:
        """FLOPs of a step, divided by its samples."""
        flops = self.costs.step_flops(self.batching, self.retained)
        return flops / (self.batching.micro_batch * self.batching.dga_steps)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints on the disk at the end, plus one that is being written."""
        settings, every = self.settings, self.settings.save_frequency
        epochs = (
            1 if every <= 0 else len({*range(every, settings.epochs + 1, every), settings.epochs})
        )
        steps = settings.keep_checkpoints if settings.save_every_steps is not None else 0
        return (
            (1 if settings.delete_previous_checkpoint else epochs)
            + steps
            + settings.save_most_recent
            + 1
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step, with the wait for its data."""
        return self.compute_seconds + self.data_seconds

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.data.steps * self.settings.epochs

    @property
    def samples_per_second(self) -> float:
        return self.batching.effective_batch / self.step_seconds if self.step_seconds else 0.0

    @property
    def hours(self) -> float:
        """Hours of training steps, without evaluation and checkpoints."""
        return self.steps * self.step_seconds / 3600

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        batching, data = self.batching, self.data
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            **{name: dataclasses.asdict(getattr(self, name)) for name in ("hardware", "costs")},
            "sources": [dataclasses.asdict(source) for source in data.sources],
            **{name: getattr(data, name) for name in ("retrieval", "missing", "notes")},
            "epoch_steps": data.steps,
            "batching": {
                "micro_batch": batching.micro_batch,
                "dga_steps": batching.dga_steps,
                "ranks": batching.world_size,
                "effective_batch": batching.effective_batch,
            },
            "gpu_hours": self.hours * self.hardware.ranks if self.hardware.kind != "cpu" else None,
            "utilisation_assumed": UTILISATION if self.estimate else None,
        }


_FIGURES = (
    "estimate", "parameters", "retained", "compute_seconds", "data_seconds", "free_disk_bytes", "peak_bytes", "sample_flops",
    "checkpoints", "step_seconds", "steps", "samples_per_second", "hours",
)  # fmt: skip


@no_code_from_data()
def make_plan(settings: PlanSettings, *, say: Say = lambda line: None) -> Plan:
    """Plan a run.

    Args:
        say: is called with a few words at the start of each stage.

    Raises:
        UserError: bad input. Missing data and programs are listed in the plan instead.
    """
    hardware = find_hardware(settings)
    assumed = hardware.kind == "assumed"
    say("opening the data")
    with quiet():  # the plan itself lists the problems
        data = check_data(settings)
    if settings.stock_pipeline and settings.train_data is not None:
        data.notes.append(
            "--train-data names no source: training takes open_clip's own data pipeline, not timed here."
        )
    device = torch.device("cuda:0" if hardware.kind == "cuda" else "cpu")
    precision = _precision(settings, hardware, device, data)
    say("building the model with random weights")
    planned = build(settings, device, precision)
    if not assumed:
        _check_files(settings, data)
    say("counting FLOPs and bytes of a step")
    costs = count_costs(planned, settings.loss_chunk)
    batching = _choose_batching(settings, hardware, costs)
    _schedule(settings, data, batching)
    retained = costs.graphs_kept(batching, settings.dga_retain, hardware.room_bytes)
    plan = Plan(settings, hardware, data, costs, batching, planned.parameters, retained)
    fits = plan.peak_bytes <= hardware.room_bytes
    if assumed:
        gpu, _ = parse_hardware(settings.assume or "")
        plan.compute_seconds = costs.seconds_on(gpu, batching, retained)
        if not gpu.bf16 and "bf" in settings.precision:
            data.notes.append(f"A {gpu.label} has no bf16 matmuls: give --precision amp.")
    elif fits and data.opened:
        timed = _timed_batching(costs, batching, device)
        say(
            f"counted: {plan.sample_flops / 1e9:,.0f} GFLOP a pair, {plan.peak_bytes / GIB:.1f} GiB at the peak; taking "
            f"steps with micro-batches of {timed.micro_batch}"
        )
        try:
            plan.timed = step = measure_step(planned, settings, timed, retained, data.opened)
        except torch.OutOfMemoryError:
            fits = False
        else:
            taken = Batching(timed.micro_batch, step.dga_steps, 1)
            more = costs.step_flops(batching, retained) / costs.step_flops(taken, step.retained)
            plan.compute_seconds = step.seconds * more
            reads = batching.dga_steps * batching.micro_batch / timed.micro_batch
            plan.data_seconds = step.wait_seconds * reads
    if not fits:
        data.missing.append(_too_large(plan))
    data.notes += _align_note(plan, planned.model)
    _check_disk(plan)
    return plan


def _timed_batching(costs: Costs, batching: Batching, device: torch.device) -> Batching:
    """The batching of the timed steps: on a CPU smaller micro-batches, so that a step takes seconds and little memory.

    A CPU's time is proportional to the samples; a GPU needs the run's own micro-batch.
    """
    if device.type != "cpu":
        return batching
    most_steps = min(LARGEST_K, batching.dga_steps)
    sample_flops = costs.step_flops(Batching(1, most_steps, 1), 0)
    size = max(1, min(batching.micro_batch, int(CPU_STEP_FLOPS / sample_flops)))
    return replace(batching, micro_batch=size)


def find_hardware(settings: PlanSettings) -> Hardware:
    """The hardware of `--assume`, the GPUs here that the run would take, or the CPU.

    Raises:
        UserError: more GPUs asked for than there are.
    """
    if settings.assume is not None:
        gpu, count = parse_hardware(settings.assume)
        return Hardware(gpu.label, "assumed", count, gpu.memory_gib, gpu.memory_gib)
    cores = usable_cores()
    present = (
        torch.cuda.device_count()
        if torch.cuda.is_available() and settings.device.startswith("cuda")
        else 0
    )
    if settings.gpus is not None and settings.gpus > present:
        raise UserError(
            f"--gpus {settings.gpus} is more than the {present} GPUs of this machine; plan for other GPUs with --assume v100:"
            f"{settings.gpus}"
        )
    if present == 0:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        free = (available_bytes(torch.device("cpu")) or 0) / GIB
        return Hardware(f"{cores} CPU cores", "cpu", 1, total, free, cores)
    count = settings.gpus or present
    free_bytes, total_bytes = map(
        min, zip(*map(torch.cuda.mem_get_info, range(count)), strict=True)
    )
    return Hardware(
        torch.cuda.get_device_name(0), "cuda", count, total_bytes / GIB, free_bytes / GIB, cores
    )


def _precision(
    settings: PlanSettings, hardware: Hardware, device: torch.device, data: DataCheck
) -> str:
    """The precision in which the step is counted and taken; a note names it if the run's precision is another one."""
    precision = settings.precision
    if hardware.kind == "assumed":
        if precision == "fp32":
            data.notes.append(
                "Estimated for half precision (--precision amp); fp32 takes several times as long."
            )
        # amp_bf16 takes as many bytes as amp, and is faster on the CPU that counts them.
        return precision if "16" in precision else "amp_bf16"
    taken = precision_on(device.type, precision)
    if taken != precision:
        data.notes.append(
            f"--precision {precision} is several times slower than fp32 on a CPU: training takes fp32 there."
        )
    if device.type == "cpu" and settings.device.startswith("cuda"):
        data.notes.append("There is no CUDA device here: the run would train on the CPU.")
    return taken


def _choose_batching(settings: PlanSettings, hardware: Hardware, costs: Costs) -> Batching:
    """B, K and W of the run; for an effective batch the B that takes the least time within the memory."""
    ranks, wanted = hardware.ranks, settings.effective_batch
    if wanted is None or settings.batch_size is not None:
        return choose_batching(settings, ranks, 1)
    if hardware.kind != "cpu":
        room = min(hardware.room_bytes, graphs_room(hardware.memory_gib))
        return choose_batching(
            settings, ranks, costs.fastest_micro_batch(wanted, ranks, settings.dga_retain, room)
        )
    size = min(CPU_MICRO_BATCH, wanted)
    while (
        size > 1
        and costs.peak_bytes(Batching(size, max(1, wanted // size), 1), 1) > hardware.room_bytes
    ):
        size //= 2
    return choose_batching(settings, ranks, size)


def _schedule(settings: PlanSettings, data: DataCheck, batching: Batching) -> None:
    """Fill in the steps of an epoch; add a note if the batch differs from the request."""
    schedule_steps(settings, data, batching.effective_batch)
    wanted = settings.effective_batch
    if wanted is not None and batching.effective_batch != wanted:
        data.notes.append(
            f"The effective batch is {batching.effective_batch:,} instead of {wanted:,}, which {batching.world_size} ranks "
            f"with micro-batches of {batching.micro_batch} do not divide."
        )


def _too_large(plan: Plan) -> str:
    b, k = plan.batching.micro_batch, plan.batching.dga_steps
    smaller = (
        f"--batch-size {b // 2} --dga-steps {2 * k}, the same effective batch"
        if b > 1
        else "a smaller model"
    )
    return (
        f"memory: micro-batches of {b} with {max(1, plan.retained)} graphs kept need {plan.peak_bytes / GIB:.1f} GiB, but "
        f"only {plan.hardware.room_bytes / GIB:.1f} GiB are usable; {smaller}, or --grad-checkpointing"
    )


def _check_files(settings: PlanSettings, data: DataCheck) -> None:
    """Weights that are not there, and pretrained weights that the run would fetch."""
    for name in ("init_from", "init_image", "init_text", "pretrained"):
        path, flag = getattr(settings, name), f"--{name.replace('_', '-')}"
        if path and (name != "pretrained" or is_file_name(path)) and not Path(path).exists():
            data.missing.append(
                f"{flag}: there is no {path}; correct the path, or leave {flag} out"
            )
    for what, advice in weights_to_fetch(settings).items():
        if constants.HF_HUB_OFFLINE:
            data.missing.append(
                f"{what} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set; {advice}"
            )
        else:
            data.notes.append(
                f"Not in the Hugging Face cache, to be fetched: {what} (without a hub: {advice})."
            )


def _align_note(plan: Plan, model: torch.nn.Module) -> list[str]:
    """The cost of `zerovl align` for these towers and pairs, by the rate of this plan's step; [] where it is not known.

    On a GPU the heads' products are fp32, taken for four times slower.
    """
    costs = plan.costs
    pairs = plan.data.steps * plan.batching.effective_batch
    gpu = plan.hardware.kind != "cpu"
    weights = sum(
        p.numel() for name, p in model.named_parameters() if group_of(name).endswith("projection")
    )
    forward = costs.replayed_flops - costs.retained_flops
    if not (pairs and weights and forward and plan.compute_seconds):
        return []
    second = costs.step_flops(plan.batching, plan.retained) / plan.compute_seconds  # FLOPs of one
    batch = min(heads_batch(gpu, weights, costs.embed_dim), pairs)
    heads = 60.0 * pairs * (weights + batch * costs.embed_dim) / second * (4 if gpu else 1)
    rows, logits = (count / GIB for count in (2 * pairs * weights / costs.embed_dim, 16 * batch**2))
    return [
        f"{'ESTIMATE ' * plan.estimate}zerovl align, new linear heads on these towers: encoding {pairs:,} pairs once takes "
        f"{duration(pairs * forward / second)} of one device and {rows:.2g} GiB of disk; ten epochs of heads in batches of "
        f"{batch:,} take {duration(heads)}, and in memory the rows and {logits:.2g} GiB."
    ]


def _check_disk(plan: Plan) -> None:
    if plan.estimate or plan.settings.logs.lower() == "none":
        return
    folder, plan.free_disk_bytes = free_space(plan.settings.logs)
    needed = plan.costs.state_bytes * plan.checkpoints
    if needed > plan.free_disk_bytes:
        plan.data.missing.append(
            f"disk: {plan.checkpoints} checkpoints take {needed / GIB:.1f} GiB, {folder} has "
            f"{plan.free_disk_bytes / GIB:.1f} GiB free; give --logs on another disk, --save-frequency 5, or "
            "--delete-previous-checkpoint"
        )
