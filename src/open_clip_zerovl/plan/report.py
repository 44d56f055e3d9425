"""A plan as text of at most 96 columns."""

from __future__ import annotations

import textwrap

from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.plan.estimate import UTILISATION
from open_clip_zerovl.plan.gpus import GIB
from open_clip_zerovl.plan.make import Plan
from open_clip_zerovl.report.tables import text_table

WIDTH, LABEL = 96, 10


def report(plan: Plan) -> str:
    """The whole plan as text; missing things come last."""
    passed_over = plan.settings.passed_over
    sections = {
        "model": [_model(plan)],
        "data": [
            *_data_table(plan),
            *(f"{name}: {what}" for name, what in plan.data.retrieval.items()),
        ],
        "hardware": [_hardware(plan)],
        "batch": [_batch(plan)],
        "step": _step(plan),
        "memory": [_memory(plan)],
        "run": _run(plan),
        "disk": [_disk(plan)],
        "notes": plan.data.notes,
        "": [f"without effect on the plan: {' '.join(passed_over)}"] if passed_over else [],
    }
    where = "ESTIMATE for" if plan.estimate else "measured on"
    lines = [
        f"zerovl plan: {where} {_devices(plan)}{', on which nothing was measured' * plan.estimate}",
        "",
    ]
    for label, texts in sections.items():
        parts = [
            part
            for text in texts
            for part in ([text] if "\0" in text else _wrapped(text, WIDTH - LABEL))
        ]
        lines += [
            f"{label * (n == 0):<{LABEL}}{part}".replace("\0", "").rstrip()
            for n, part in enumerate(parts)
        ]
    missing = ["Missing:"] if plan.data.missing else ["Nothing is missing."]
    for fault, separator, advice in (text.rpartition("; ") for text in plan.data.missing):
        # A command stays on one line, for the shell.
        missing += (
            [*_wrapped(f"- {fault};", WIDTH, "  "), f"  {advice}"]
            if separator
            else _wrapped(f"- {advice}", WIDTH, "  ")
        )
    return "\n".join([*lines, "", *missing])


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _devices(plan: Plan) -> str:
    hardware = plan.hardware
    return hardware.name if hardware.kind == "cpu" else f"{hardware.ranks}x {hardware.name}"


def _model(plan: Plan) -> str:
    settings = plan.settings
    total, trained = plan.parameters
    text = f"{settings.model}, {total / 1e6:.1f} M parameters"
    if trained < total:
        text += f", {trained / 1e6:.1f} M of them trained"
    if settings.token_drop is not None:
        text += f", token drop {settings.token_drop:g}"
    return f"{text}, {settings.precision}, {plan.sample_flops / 1e9:.3g} GFLOP a sample"


def _data_table(plan: Plan) -> list[str]:
    """Lines that begin with a NUL, so that they are not wrapped."""
    rows = []
    for source in plan.data.sources:
        mixed = source.steps is None and source.left_over is not None
        steps = "mixed" if mixed else _number(source.steps, "")
        left = _number(source.left_over, "")
        rows.append(
            [source.name, _number(source.pairs, "?"), source.layout, steps, left, source.state]
        )
    if len(rows) > 1:
        total = sum(source.pairs or 0 for source in plan.data.sources)
        left = f"{sum(source.left_over or 0 for source in plan.data.sources):,}"
        rows.append(["all", _number(total or None, "?"), "", f"{plan.data.steps:,}", left, ""])
    table = text_table(["source", "pairs", "layout", "steps/epoch", "left over", "state"], rows)
    return [f"\0{line}" for line in table.splitlines()]


def _number(value: int | None, unknown: str) -> str:
    return unknown if value is None else f"{value:,}"


def _hardware(plan: Plan) -> str:
    hardware = plan.hardware
    if plan.estimate:
        return f"{_devices(plan)}, a rank each (torchrun), {hardware.memory_gib:g} GiB of memory each as sold"
    free = f"{hardware.free_gib:.1f} of {hardware.memory_gib:.1f} GiB free"
    if hardware.kind == "cpu":
        return f"no GPU: one rank on {hardware.name}, {free}"
    return f"{_devices(plan)}, a rank each (torchrun), {free}; {hardware.cores} CPU cores"


def _batch(plan: Plan) -> str:
    batching, retained = plan.batching, plan.retained
    text = f"micro-batch {batching.micro_batch} x {batching.dga_steps} DGA steps x {batching.world_size} rank"
    text += f"{'s' * (batching.world_size > 1)} = effective batch {batching.effective_batch:,}"
    if batching.dga_steps > 1:
        text += f"; {retained} graph{'s' * (retained != 1)} kept, {batching.dga_steps - retained} replayed"
    if plan.settings.effective_batch is not None and plan.settings.batch_size is None:
        text += f": --batch-size {batching.micro_batch} --dga-steps {batching.dga_steps}"
        text += f" --dga-retain {plan.settings.dga_retain}" if batching.dga_steps > 1 else ""
    return text


def _step(plan: Plan) -> list[str]:
    if not plan.step_seconds:
        return ["not measured: see the missing things below"]
    if plan.estimate:
        return [
            f"ESTIMATE {duration(plan.step_seconds)}: counted FLOPs at {100 * UTILISATION:.1f} % of the GPU's peak, the "
            "share that the paper's V100s reached (Table 5: 680 GPU hours)"
        ]
    workers = plan.settings.workers
    how = "read in between" if workers == 0 else f"{workers} loader process{'es' * (workers > 1)}"
    wait = f"{duration(plan.data_seconds)} waiting for data ({how})"
    lines = [
        f"{duration(plan.step_seconds)}: {duration(plan.compute_seconds)} of computation, {wait}"
    ]
    step = plan.timed
    if step is not None and step.dga_steps != plan.batching.dga_steps:
        lines.append(
            f"by counted FLOPs from a step of {step.dga_steps} micro-batches with {step.retained} kept, which took "
            f"{duration(step.seconds)}"
        )
    if plan.hardware.ranks > 1:
        lines.append(
            "timed on one rank: without the exchange of gradients and the other ranks' loader processes"
        )
    return lines


def _memory(plan: Plan) -> str:
    size, hardware = _size(plan.peak_bytes), plan.hardware
    if not plan.estimate:
        return f"{size} counted in tensors, of {hardware.free_gib:.1f} GiB free"
    return f"ESTIMATE {size} of {hardware.memory_gib:g} GiB a GPU, counted in tensors"


def _run(plan: Plan) -> list[str]:
    if not plan.step_seconds:
        return []
    if not plan.data.steps:
        return ["steps of an epoch are not known: --train-num-samples gives the number of pairs"]
    rate, seconds = plan.samples_per_second, 3600 * plan.hours
    text = f"{plan.data.steps:,} steps an epoch x {plan.settings.epochs} = {plan.steps:,} steps; "
    text += f"{'ESTIMATE ' * plan.estimate}{f'{rate:,.0f}' if rate >= 1000 else f'{rate:.4g}'} samples/s, {duration(seconds)}"
    if plan.hardware.kind != "cpu":
        text += f", {plan.hours * plan.hardware.ranks:,.3g} GPU hours"
    return [text + "; evaluation and checkpoints come on top"]


def _disk(plan: Plan) -> str:
    total = plan.checkpoints * plan.costs.state_bytes
    text = f"{plan.checkpoints} checkpoints of {_size(plan.costs.state_bytes)} at once: {_size(total)} in --logs"
    return (
        text
        if plan.free_disk_bytes is None
        else f"{text}, which has {_size(plan.free_disk_bytes)} free"
    )


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.1f} MiB"
