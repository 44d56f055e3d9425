"""A plan as text of at most 96 columns."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable

from open_clip_zerovl.plan.answer import Plan
from open_clip_zerovl.plan.data import Missing
from open_clip_zerovl.plan.estimate import UTILISATION
from open_clip_zerovl.plan.gpus import GIB
from open_clip_zerovl.plan.measure import LOSS_ROWS_ON_CPU

WIDTH, LABEL = 96, 10


def report(plan: Plan) -> str:
    """All of a plan; what is missing comes last."""
    sections = [
        ("model", _model(plan)),
        ("data", _data(plan)),
        ("hardware", _hardware(plan)),
        ("batch", _batch(plan)),
        ("step", _step(plan)),
        ("memory", _memory(plan)),
        ("teachers", _teachers(plan)),
        ("loaders", _loaders(plan)),
        ("run", _run(plan)),
        ("disk", _disk(plan)),
        ("notes", plan.notes),
    ]
    lines = [_title(plan), ""]
    for label, texts in sections:
        lines += _section(label, texts)
    if plan.settings.passed_over:
        lines += _section("", [f"without effect on the plan: {' '.join(plan.settings.passed_over)}"])
    lines.append("")
    if plan.elsewhere:
        lines.append("Not on this machine:")
        lines += _listed(plan.elsewhere)
    if plan.missing:
        lines.append("Missing:")
        lines += _listed(plan.missing)
    else:
        lines.append("Nothing else is missing." if plan.elsewhere else "Nothing is missing.")
    return "\n".join(lines)


def _listed(missing: Iterable[Missing]) -> list[str]:
    lines = []
    for one in missing:
        text = f"- {one.what}  ->  {one.advice}"
        if len(text) > WIDTH and one.advice.startswith("zerovl "):
            lines += [f"- {one.what}  ->", *_command(one.advice)]
            continue
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return lines


def _command(command: str) -> list[str]:
    """A command in lines that a shell takes together."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(f"  {lines[-1]} {word} \\") > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [f"  {line}{end}" for line, end in zip(lines, [*[" \\"] * (len(lines) - 1), ""], strict=True)]


def _title(plan: Plan) -> str:
    if plan.estimate:
        return f"zerovl plan: ESTIMATE for {_devices(plan)}, on which nothing was measured"
    return f"zerovl plan: measured on {_devices(plan)}"


def _devices(plan: Plan) -> str:
    hardware = plan.hardware
    return hardware.name if hardware.kind == "cpu" else f"{hardware.ranks}x {hardware.name}"


def _section(label: str, texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        head = label if not lines else ""
        parts = (
            [text]
            if "\0" in text
            else textwrap.wrap(text, WIDTH - LABEL, break_on_hyphens=False, break_long_words=False)
        )
        lines += [f"{head if index == 0 else '':<{LABEL}}{part}" for index, part in enumerate(parts)]
    return [line.replace("\0", "").rstrip() for line in lines]


def _model(plan: Plan) -> list[str]:
    settings = plan.settings
    text = f"{settings.model}, {plan.parameters / 1e6:.1f} M parameters"
    if plan.trained_parameters < plan.parameters:
        text += f", {plan.trained_parameters / 1e6:.1f} M of them trained"
    text += f", {settings.precision}"
    if settings.token_drop is not None:
        text += f", token drop {settings.token_drop:g}"
    if plan.sample_flops:
        text += f", {plan.sample_flops / 1e9:.3g} GFLOP a sample"
    return [text]


def _data(plan: Plan) -> list[str]:
    rows = [["source", "pairs", "layout", "steps/epoch", "left over", "state"]]
    for source in plan.sources:
        rows.append(
            [
                source.name,
                "?" if source.pairs is None else f"{source.pairs:,}",
                source.layout,
                "mixed" if source.steps is None and source.left_over is not None else _number(source.steps),
                _number(source.left_over),
                source.state,
            ]
        )
    total = sum(source.pairs or 0 for source in plan.sources)
    if len(plan.sources) > 1:
        left = [source.left_over for source in plan.sources if source.left_over is not None]
        rows.append(
            ["all", f"{total:,}" if total else "?", "", f"{plan.epoch_steps:,}", f"{sum(left):,}" if left else "", ""]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("\0" + "  ".join(cells))
    lines += [f"{name}: {what}" for name, what in plan.retrieval.items()]
    return lines


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _hardware(plan: Plan) -> list[str]:
    hardware = plan.hardware
    if plan.estimate:
        return [f"{_devices(plan)}, a rank each (torchrun), {hardware.memory_gib:g} GiB of memory each as sold"]
    if hardware.kind == "cpu":
        return [f"no GPU: one rank on {hardware.name}, {hardware.free_gib:.1f} of {hardware.memory_gib:.1f} GiB free"]
    return [
        f"{_devices(plan)}, a rank each (torchrun), {hardware.free_gib:.1f} of {hardware.memory_gib:.1f} GiB free; "
        f"{hardware.cores} CPU cores"
    ]


def _batch(plan: Plan) -> list[str]:
    batching = plan.batching
    text = f"micro-batch {batching.micro_batch} x {batching.dga_steps} DGA steps x {batching.world_size} rank"
    text += f"{'s' * (batching.world_size > 1)} = effective batch {batching.effective_batch:,}"
    if batching.dga_steps > 1 and plan.step_seconds:
        text += (
            f"; {plan.retained} graph{'s' * (plan.retained != 1)} kept, {batching.dga_steps - plan.retained} replayed"
        )
    if plan.settings.effective_batch is not None and plan.settings.batch_size is None:
        text += f": --batch-size {batching.micro_batch} --dga-steps {batching.dga_steps}"
        text += f" --dga-retain {plan.settings.dga_retain}" if batching.dga_steps > 1 else ""
    return [text]


def _step(plan: Plan) -> list[str]:
    if not plan.step_seconds:
        return ["not measured: see what is missing"]
    if plan.estimate:
        return [
            f"ESTIMATE {_seconds(plan.step_seconds)}: counted FLOPs at {100 * UTILISATION:.1f} % of the GPU's peak, the share "
            "that the paper's V100s reached (Table 5: 680 GPU hours)"
        ]
    parts = [f"{_seconds(plan.compute_seconds)} of computation"]
    if plan.data_seconds is None:
        parts.append("on random samples, without reading: there is no data on this machine")
    else:
        workers = plan.settings.workers
        how = "read in between" if workers == 0 else f"read by {workers} loader process{'es' * (workers > 1)} meanwhile"
        parts.append(f"{_seconds(plan.data_seconds)} of one core's data work, {how}")
    lines = [f"{_seconds(plan.step_seconds)}: " + ", ".join(parts)]
    if plan.timed and plan.timed[0][0] != plan.batching.dga_steps:
        taken = ", ".join(f"{k} micro-batches with {r} kept {_seconds(s)}" for k, r, s in plan.timed)
        lines.append(f"from steps of {taken}")
    loss = plan.loss_seconds or 0.0
    if loss > 0.02 * plan.step_seconds:
        how = ""
        if plan.hardware.kind == "cpu" and plan.batching.effective_batch > LOSS_ROWS_ON_CPU:
            how = f", four times that of half as many pairs, timed at {LOSS_ROWS_ON_CPU:,}"
        lines.append(f"the loss over {plan.batching.effective_batch:,} pairs is {_seconds(loss)} of it{how}")
    if plan.hardware.ranks > 1:
        lines.append("timed on one rank, without the ranks' exchange of gradients")
    return lines


def _memory(plan: Plan) -> list[str]:
    if plan.peak_bytes is None:
        return []
    hardware = plan.hardware
    size = _size(plan.peak_bytes)
    if plan.estimate:
        text = f"ESTIMATE {size} of {hardware.memory_gib:g} GiB a GPU, counted in tensors"
        roomy = plan.peak_bytes < 0.4 * hardware.memory_gib * GIB and plan.settings.dga_retain != "auto"
        if roomy and plan.settings.batch_size is None and plan.batching.dga_steps > 1:
            text += "; there is room for --dga-retain auto or a larger --batch-size"
        return [text]
    if hardware.kind == "cpu":
        return [f"{size} counted in tensors, of {hardware.free_gib:.1f} GiB free"]
    kept = max((r for _, r, _ in plan.timed), default=0)
    return [f"{size} a GPU at the peak of steps with {kept} graphs kept, of {hardware.memory_gib:.1f} GiB"]


def _teachers(plan: Plan) -> list[str]:
    teachers = plan.teachers
    if teachers is None:
        return []
    widths = ", ".join(map(str, teachers.widths)) or "unknown"
    text = f"embeddings of width {widths} in {teachers.place}"
    if teachers.views is not None:
        text += f", {teachers.views} views"
    if teachers.stored_bytes is not None:
        text += f": {_size(teachers.stored_bytes)}"
    if not teachers.made:
        text += ", still to be made"
    elif teachers.place == "the shards":
        text += ": none are to be made"
    lines = [text]
    if plan.teacher_hours is not None and teachers.samples is not None:
        ranks = plan.hardware.ranks
        text = f"zerovl teacher, before training: {teachers.samples:,} samples by {', '.join(teachers.models)}"
        text += f" in {ranks} calls, one a GPU (--part I/{ranks})" if ranks > 1 else ""
        text += f"; {'ESTIMATE ' if plan.estimate else ''}{_time(plan, plan.teacher_hours)}, its FLOPs at the rate of a step's"
        lines.append(text)
    if teachers.sample_bytes:
        whole = "" if teachers.place != "the shards" else " (and unpacks all that its sample has)"
        lines.append(f"a sample reads {teachers.sample_bytes / 1024:.1f} KiB of embeddings{whole}")
    return lines


def _loaders(plan: Plan) -> list[str]:
    settings, ranks = plan.settings, plan.hardware.ranks
    if plan.estimate:
        each = plan.samples_per_second / (ranks * max(1, settings.workers))
        return [
            f"{ranks} x {settings.workers} loader processes must deliver {plan.samples_per_second:,.0f} samples/s, "
            f"{each:,.0f} each"
        ]
    if plan.loader_rate is None or plan.data_seconds is None:
        return []
    lines = [f"{plan.loader_rate:,.0f} samples/s a loader process (read, decoded, augmented, tokenized)"]
    cores = plan.hardware.cores or 1
    if settings.workers * ranks > cores:
        lines.append(
            f"{ranks} x {settings.workers} loader processes share {cores} cores: give --workers {max(1, cores // ranks)}"
        )
    if settings.workers and plan.step_seconds > 1.02 * plan.compute_seconds:
        needed = -(-plan.data_seconds // plan.compute_seconds)
        lines.append(
            f"the loaders do not keep up: give {needed:.0f} processes a rank, with a core each, or store smaller pictures "
            "(zerovl data stores them with 256 px)"
        )
    elif settings.workers:
        lines.append("the loaders keep up")
    return lines


def _run(plan: Plan) -> list[str]:
    if not plan.step_seconds:
        return []
    word = "ESTIMATE " if plan.estimate else ""
    text = f"{plan.epoch_steps:,} steps an epoch x {plan.settings.epochs} = {plan.steps:,} steps; {word}"
    rate = plan.samples_per_second
    text += f"{rate:,.0f} samples/s" if rate >= 1000 else f"{rate:.4g} samples/s"
    text += f", {_time(plan, plan.hours)}"
    lines = [text + "; evaluation and checkpoints come on top"]
    if plan.teacher_hours is not None:
        lines.append(f"with zerovl teacher: {word}{_time(plan, plan.hours_with_teachers)}")
    return lines


def _disk(plan: Plan) -> list[str]:
    total = plan.checkpoints * plan.checkpoint_bytes
    text = f"{plan.checkpoints} checkpoints of {_size(plan.checkpoint_bytes)} at once: {_size(total)} in --logs"
    if plan.free_disk_bytes is not None:
        text += f", which has {_size(plan.free_disk_bytes)} free"
    return [text]


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _time(plan: Plan, hours: float) -> str:
    text = _hours(hours)
    return text if plan.hardware.kind == "cpu" else f"{text}, {hours * plan.hardware.ranks:,.3g} GPU hours"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s"
    if hours < 2:
        return f"{60 * hours:.3g} minutes"
    return f"{hours:,.3g} hours" if hours < 96 else f"{hours:,.3g} hours ({hours / 24:.1f} days)"
