"""Making a plan: data is opened, the model is built, and the step's time and memory are found.

For this machine a few real steps are taken (measure.py). For other hardware FLOPs and bytes are counted and a table of GPUs
gives the rest (estimate.py, gpus.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import constants

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import available_bytes
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.dga.retain import AUTO_SHARE, most_graphs
from open_clip_zerovl.models.local_dir import no_code_from_data
from open_clip_zerovl.plan.answer import Hardware, Plan
from open_clip_zerovl.plan.data import DataCheck, Missing, check_data, schedule_steps
from open_clip_zerovl.plan.estimate import Costs, count_costs, estimated_seconds
from open_clip_zerovl.plan.gpus import CPU_MICRO_BATCH, GIB, USABLE_SHARE, graphs_room, micro_batch_for, parse_hardware
from open_clip_zerovl.plan.measure import fits, largest_that_fits, measure_loader, measure_step, step_with_data
from open_clip_zerovl.plan.model import PlannedModel, build, is_file_name, quiet, weights_to_fetch
from open_clip_zerovl.plan.settings import PlanSettings, choose_batching
from open_clip_zerovl.plan.teachers import check_teachers, missing_teachers
from open_clip_zerovl.recipe.step import precision_on

Say = Callable[[str], None]


@no_code_from_data()
def make_plan(settings: PlanSettings, *, say: Say = lambda line: None) -> Plan:
    """Plan a run.

    Args:
        say: is called with a few words at the start of each stage.

    Raises:
        UserError: bad input. What is missing is listed in the plan instead.
    """
    gpu, count = parse_hardware(settings.assume) if settings.assume is not None else (None, 0)
    if gpu is not None:
        hardware = Hardware(gpu.label, "assumed", count, gpu.memory_gib, gpu.memory_gib, None)
    else:
        hardware = find_hardware(settings)
    say("opening the data")
    with quiet():  # the plan itself lists what is wrong
        data = check_data(settings)
    if settings.stock_pipeline and settings.train_data is not None:
        data.notes.append("--train-data names no source: training takes open_clip's own data pipeline, not timed here.")
    precision = settings.precision
    if gpu is not None and "16" not in precision:
        if precision == "fp32":
            data.notes.append("Estimated for half precision (--precision amp); fp32 takes several times as long.")
        precision = "amp_bf16"  # takes as many bytes as amp, and is faster on the CPU that counts them
    device = torch.device("cuda:0" if hardware.kind == "cuda" else "cpu")
    if gpu is None and precision_on(device.type, precision) != precision:
        data.notes.append(
            f"--precision {precision} is several times slower than fp32 on a CPU: training takes fp32 there."
        )
        precision = precision_on(device.type, precision)
    if gpu is None and device.type == "cpu" and settings.device.startswith("cuda"):
        data.notes.append("There is no CUDA device here: the run would train on the CPU.")
    teachers = check_teachers(settings, data)
    say("building the model with random weights")
    planned = build(settings, device, precision)
    readable = teachers is not None and (gpu is not None or teachers.made or not data.opened)
    planned.teacher_widths = teachers.widths if teachers is not None and readable else ()
    if teachers is not None and not teachers.made:
        absent = missing_teachers(settings, teachers.place, planned.model.visual.image_size)
        (data.missing if gpu is None else data.elsewhere).append(absent)
    for what, advice in weights_to_fetch(settings, planned.stand_in).items():
        if constants.HF_HUB_OFFLINE and gpu is None:
            data.missing.append(Missing(f"{what} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set", advice))
        else:
            data.notes.append(f"Not in the Hugging Face cache, to be fetched: {what} (without a hub: {advice}).")
    if gpu is not None:
        plan = _estimated(settings, hardware, planned, data, say)
        if not gpu.bf16 and "bf" in settings.precision:
            plan.notes.append(f"A {gpu.label} multiplies no bf16: give --precision amp.")
    else:
        plan = _measured(settings, hardware, planned, data, say)
    plan.teachers = teachers
    _add_teachers_time(plan)
    _add_disk(plan, planned)
    _add_files(plan)
    return plan


def find_hardware(settings: PlanSettings) -> Hardware:
    """The GPUs here that the run would take, or the CPU.

    Raises:
        UserError: more GPUs asked for than there are.
    """
    cores = usable_cores()
    present = torch.cuda.device_count() if torch.cuda.is_available() and settings.device.startswith("cuda") else 0
    if settings.gpus is not None and settings.gpus > present:
        raise UserError(
            f"--gpus {settings.gpus} asks for more than the {present} GPUs here; plan for others with --assume v100:"
            f"{settings.gpus}"
        )
    if present == 0:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        free = (available_bytes(torch.device("cpu")) or 0) / GIB
        return Hardware(f"{cores} CPU cores", "cpu", 1, total, free, cores)
    count = settings.gpus or present
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    return Hardware(
        torch.cuda.get_device_name(0),
        "cuda",
        count,
        min(total for _, total in memory) / GIB,
        min(free for free, _ in memory) / GIB,
        cores,
    )


def _new_plan(
    settings: PlanSettings, hardware: Hardware, planned: PlannedModel, data: DataCheck, batching: Batching
) -> Plan:
    schedule_steps(settings, data, batching.effective_batch)
    wanted = settings.effective_batch
    if wanted is not None and batching.effective_batch != wanted:
        data.notes.append(
            f"The effective batch is {batching.effective_batch:,} instead of {wanted:,}, which {batching.world_size} ranks "
            f"with micro-batches of {batching.micro_batch} do not divide."
        )
    parameters, trained = planned.parameters
    steps = data.steps * settings.epochs
    if settings.warmup > steps and not {"--warmup-share", "--skip-scheduler"} & set(settings.passed_over):
        data.notes.append(
            f"--warmup {settings.warmup} is longer than the run's {steps} steps: the learning rate never reaches --lr; give "
            "--warmup-share 0.025."
        )
    return Plan(
        settings,
        hardware,
        settings.assume is not None,
        data.sources,
        data.retrieval,
        batching,
        data.steps,
        parameters,
        trained,
        missing=data.missing,
        elsewhere=data.elsewhere,
        notes=data.notes,
    )


def _estimated(settings: PlanSettings, hardware: Hardware, planned: PlannedModel, data: DataCheck, say: Say) -> Plan:
    assert settings.assume is not None
    gpu, _ = parse_hardware(settings.assume)
    say("counting FLOPs and bytes of a step")
    costs = count_costs(planned)
    micro_batch = micro_batch_for(gpu.memory_gib)
    if settings.effective_batch is not None:
        micro_batch = _fastest(settings, hardware.ranks, costs, graphs_room(gpu.memory_gib))
    batching = choose_batching(settings, hardware.ranks, micro_batch)
    plan = _new_plan(settings, hardware, planned, data, batching)
    memory = USABLE_SHARE * gpu.memory_gib * GIB
    plan.retained = _graphs(settings, batching, costs, memory)
    plan.peak_bytes = costs.peak_bytes(batching, plan.retained, settings.loss_chunk)
    plan.step_seconds = plan.compute_seconds = estimated_seconds(
        costs, batching, plan.retained, settings.loss_chunk, gpu
    )
    plan.sample_flops = _sample_flops(costs, plan)
    if plan.peak_bytes > memory:
        plan.missing.append(_too_large(plan, plan.peak_bytes, memory))
    return plan


def _fastest(settings: PlanSettings, ranks: int, costs: Costs, memory_bytes: float) -> int:
    """The micro-batch that, with its K and R, takes the least time for the effective batch of the settings."""
    assert settings.effective_batch is not None
    chunk, retain = settings.loss_chunk, settings.dga_retain
    return costs.fastest(settings.effective_batch, ranks, memory_bytes, chunk, retain).micro_batch


def _sample_flops(costs: Costs, plan: Plan) -> float:
    """FLOPs of a step, divided by its samples."""
    flops = costs.step_flops(plan.batching, plan.retained, plan.settings.loss_chunk)
    return flops / (plan.batching.micro_batch * plan.batching.dga_steps)


def _graphs(settings: PlanSettings, batching: Batching, costs: Costs, memory_bytes: float) -> int:
    if isinstance(settings.dga_retain, int):
        return min(settings.dga_retain, most_graphs(batching.dga_steps, batching.world_size))
    return costs.graphs_that_fit(batching, memory_bytes, settings.loss_chunk)


def _too_large(plan: Plan, needed: float, memory: float) -> Missing:
    b, k = plan.batching.micro_batch, plan.batching.dga_steps
    smaller = f"--batch-size {b // 2} --dga-steps {2 * k}, the same effective batch" if b > 1 else "a smaller model"
    return Missing(
        f"memory: micro-batches of {b} with {max(1, plan.retained)} graphs kept need {needed / GIB:.1f} GiB, but only "
        f"{memory / GIB:.1f} GiB are usable",
        f"{smaller}, or --grad-checkpointing",
    )


def _measured(settings: PlanSettings, hardware: Hardware, planned: PlannedModel, data: DataCheck, say: Say) -> Plan:
    say(f"looking for a micro-batch that fits ({hardware.name})")
    chosen = settings.effective_batch is not None and settings.batch_size is None
    costs = count_costs(planned, with_memory=hardware.kind == "cpu" or chosen)
    room = AUTO_SHARE * hardware.free_gib * GIB
    most = max(1, (settings.effective_batch or 64) // hardware.ranks)

    def fit(size: int) -> bool:
        if hardware.kind == "cuda":
            return fits(planned, settings, size)
        batching = Batching(size, max(1, most // size), 1)
        return costs.peak_bytes(batching, 1, settings.loss_chunk) < room

    if settings.batch_size is None:
        if hardware.kind == "cpu":
            start, most = CPU_MICRO_BATCH, min(most, CPU_MICRO_BATCH)
        elif chosen:
            start = most = _fastest(settings, hardware.ranks, costs, min(room, graphs_room(hardware.memory_gib)))
        else:
            start = micro_batch_for(hardware.memory_gib)
        largest = largest_that_fits(fit, start, most)
        batching = choose_batching(settings, hardware.ranks, max(1, largest))
        too_large = largest == 0
    else:
        batching = choose_batching(settings, hardware.ranks, settings.batch_size)
        too_large = not fit(settings.batch_size)
    plan = _new_plan(settings, hardware, planned, data, batching)
    if too_large:
        needed = costs.peak_bytes(batching, 1, settings.loss_chunk) if hardware.kind == "cpu" else room / AUTO_SHARE
        plan.missing.append(_too_large(plan, needed, room))
        return plan
    say("taking steps")
    step = measure_step(planned, settings, batching, data.opened)
    plan.compute_seconds, plan.loss_seconds, plan.retained = step.seconds, step.loss_seconds, step.retained
    plan.timed = step.timed
    plan.peak_bytes = step.peak_bytes
    if hardware.kind == "cpu":
        plan.peak_bytes = costs.peak_bytes(batching, plan.retained, settings.loss_chunk)
    plan.sample_flops = _sample_flops(costs, plan)
    plan.step_seconds = plan.compute_seconds
    if data.opened:
        say("reading samples")
        rate = measure_loader(planned, settings, batching, data.opened)
        plan.loader_rate = rate.samples_per_second
        plan.data_seconds = batching.micro_batch * batching.dga_steps / plan.loader_rate
        plan.step_seconds = step_with_data(
            plan.compute_seconds,
            plan.data_seconds,
            workers=settings.workers,
            ranks=hardware.ranks,
            cores=hardware.cores or 1,
            compute_threads=torch.get_num_threads() if hardware.kind == "cpu" else 0,
        )
    return plan


def _add_teachers_time(plan: Plan) -> None:
    """Hours of `zerovl teacher`: its FLOPs at the rate of the run's steps."""
    if plan.teachers is None or plan.teachers.flops is None or not (plan.sample_flops and plan.compute_seconds):
        return
    per_second = plan.sample_flops * plan.batching.effective_batch / plan.compute_seconds
    plan.teacher_hours = plan.teachers.flops / per_second / 3600


def kept_checkpoints(settings: PlanSettings) -> int:
    """How many checkpoints are on the disk at the end, plus one that is being written."""
    every = settings.save_frequency
    epochs = 1 if every <= 0 else len({*range(every, settings.epochs + 1, every), settings.epochs})
    if settings.delete_previous_checkpoint:
        epochs = 1
    steps = settings.keep_checkpoints if settings.save_every_steps is not None else 0
    return epochs + steps + settings.save_most_recent + 1


def _add_disk(plan: Plan, planned: PlannedModel) -> None:
    plan.checkpoint_bytes = planned.state_bytes
    plan.checkpoints = kept_checkpoints(plan.settings)
    if plan.estimate or plan.settings.logs.lower() == "none":
        return
    folder = Path(plan.settings.logs).absolute()
    while not folder.exists():
        folder = folder.parent
    plan.free_disk_bytes = shutil.disk_usage(folder).free
    needed = plan.checkpoint_bytes * plan.checkpoints
    _require_teachers_room(plan)
    if needed > plan.free_disk_bytes:
        plan.missing.append(
            Missing(
                f"disk: {plan.checkpoints} checkpoints take {needed / GIB:.1f} GiB, {folder} has "
                f"{plan.free_disk_bytes / GIB:.1f} GiB free",
                "--logs on another disk, --save-frequency 5, or --delete-previous-checkpoint",
            )
        )


def _require_teachers_room(plan: Plan) -> None:
    teachers = plan.teachers
    if teachers is None or teachers.made or not teachers.stored_bytes:
        return
    folder = Path(teachers.place).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if teachers.stored_bytes > free:
        plan.missing.append(
            Missing(
                f"disk: the teachers' embeddings take {teachers.stored_bytes / GIB:.1f} GiB, {folder} has "
                f"{free / GIB:.1f} GiB free",
                "fewer --teacher-views, or --teacher on another disk",
            )
        )


def _add_files(plan: Plan) -> None:
    for name in ("init_from", "init_image", "init_text", "pretrained"):
        path = getattr(plan.settings, name)
        if path and (name != "pretrained" or is_file_name(path)) and not Path(path).exists():
            flag = f"--{name.replace('_', '-')}"
            text = f"{flag}: there is no {path}"
            missing = Missing(text, f"correct the path, or leave {flag} out")
            (plan.elsewhere if plan.estimate else plan.missing).append(missing)
