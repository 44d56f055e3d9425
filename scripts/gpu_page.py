"""The page of a GPU's results (scripts/gpu.py): Markdown from the results of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from open_clip_zerovl.report.tables import markdown_table

GOAL = 3300  # samples a second: the paper's 14.23 M pairs x 20 epochs in 24 hours
Parts = Mapping[str, Mapping[str, Any]]


def page(parts: Parts) -> str:
    """The whole page. A part without results has no section; those that are not done are listed with their reason."""
    sections = [
        about(parts),
        tests(parts),
        steps(parts),
        loss(parts),
        plan(parts),
        retrieval(parts, "demo", "The emoji demo, 20 epochs on the GPU (RSUM of held-out pairs, 0 to 600):"),
        retrieval(parts, "ablation", "The short runs of the ablation that fitted into the time:"),
        open_parts(parts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def results_of(parts: Parts, name: str) -> Mapping[str, Any]:
    return parts.get(name, {}).get("results", {})


def about(parts: Parts) -> str:
    found = results_of(parts, "machine").get("machine")
    if found is None:
        return "# On a GPU\n\nThe machine was not measured yet."
    memory = f", {found['memory_gib']:.0f} GiB" if found["memory_gib"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    sheet = f", {found['datasheet_tflops']:g} by its data sheet" if found["datasheet_tflops"] else ""
    return (
        f"# On {found['device']}\n\n"
        f"{found['device']}{memory}; Python {found['python']}, CUDA {found['cuda']}, {versions}. A bf16 product of random "
        f"8192 x 8192 matrices runs at {found['matrix_tflops']:.0f} TFLOP/s{sheet}; a copy on the device moves "
        f"{found['copy_tb_per_second']:.2f} TB/s, read and written. Made by `make gpu` (`scripts/gpu.py`)."
    )


def tests(parts: Parts) -> str:
    outcomes = {key: values["outcome"] for key, values in results_of(parts, "tests").items()}
    if not outcomes:
        return ""
    counts = [
        f"{number} {word}"
        for word in ("passed", "failed", "error", "skipped")
        if (number := sum(outcome == word for outcome in outcomes.values()))
    ]
    lines = [f"Tests marked gpu: {', '.join(counts)}."]
    lines += [f"- {outcome}: `{key}`" for key, outcome in outcomes.items() if outcome != "passed"]
    return "## Exactness\n\n" + "\n".join(lines)


def steps(parts: Parts) -> str:
    peak = results_of(parts, "machine").get("machine", {}).get("datasheet_tflops")
    rows, gflops, micro_batch = [], None, None
    for part in ("steps", "steps-compiled"):
        for values in results_of(parts, part).values():
            gflops, micro_batch = values["gflops_per_sample"], values["micro_batch"]
            if "way" not in values:
                continue
            head = [values["mode"], str(values["steps"])]
            if "error" in values:
                rows.append([*head, values["way"], values["error"], *["-"] * 4])
                continue
            kept = f" (R={values['retained']})" if values["way"].endswith("auto") else ""
            used = values["samples_per_second"] * gflops * 1e9
            rows.append(
                [
                    *head,
                    values["way"] + kept,
                    f"{values['seconds']:.3f}",
                    f"{values['ratio_to_plain']:.3f}",
                    f"{values['samples_per_second']:,.0f}",
                    f"{used / (peak * 1e12):.1%}" if peak else "-",
                    f"{values['peak_gib']:.2f}",
                ]
            )
    if not rows:
        return ""
    best = max(
        (
            values["samples_per_second"]
            for part in ("steps", "steps-compiled")
            for values in results_of(parts, part).values()
            if values.get("way", "").startswith("ours") and "samples_per_second" in values and values["steps"] > 1
        ),
        default=None,
    )
    header = ["model", "K", "way", "seconds a step", "time / plain", "samples/s", "model FLOPs utilisation", "peak GiB"]
    first = [
        f"{values['mode']} {values['first_seconds']:.0f} s"
        for part in ("steps", "steps-compiled")
        for values in results_of(parts, part).values()
        if "first_seconds" in values
    ]
    goal = (
        "" if best is None else f" The best of ours takes {best:,.0f} samples/s; the paper's 14M recipe in 24 hours on "
    )
    goal += "" if best is None else f"one GPU needs {GOAL:,}."
    return (
        f"## Steps\n\nMicro-batches of {micro_batch}, {gflops:.3g} GFLOP a sample without any replay; gradient only, without "
        f"optimizer and data loading. First step: {', '.join(first)}.{goal}\n\n{markdown_table(header, rows)}"
    )


def loss(parts: Parts) -> str:
    rows = [
        [f"{row['pairs']:,}", row["loss"], f"{row['seconds']:.3f}", f"{row['peak_mib'] / 1024:.2f}"]
        for values in results_of(parts, "loss").values()
        for row in values["rows"]
    ]
    if not rows:
        return ""
    return (
        "## Loss\n\nForward and backward on unit features of width 512; memory counts features and their gradients.\n\n"
        + markdown_table(["pairs", "loss", "seconds", "peak GiB"], rows)
    )


def plan(parts: Parts) -> str:
    found = results_of(parts, "plan").get("plan")
    if found is None:
        return ""
    ratio = found["planned_seconds"] / found["real_seconds"]
    return (
        f"## Plan\n\n`zerovl plan` predicted {found['planned_seconds']:.3f} s a step ({found['planned_compute_seconds']:.3f} s "
        f"of computation) for {found['model']}, {found['micro_batch']} x {found['steps']}, {found['retained']} graphs kept, "
        f"and {found['planned_peak_gib']:.1f} GiB. Training took {found['real_seconds']:.3f} s (median of "
        f"{found['logged_steps']} steps, {found['real_range'][0]:.3f} to {found['real_range'][1]:.3f}): planned / real = "
        f"{ratio:.2f}."
    )


def retrieval(parts: Parts, name: str, sentence: str) -> str:
    found = results_of(parts, name)
    if not found:
        return ""
    pools = list(next(iter(found.values()))["rsum"])
    rows = [[run, *(f"{values['rsum'][pool]:.1f}" for pool in pools)] for run, values in found.items()]
    return f"## {name.capitalize()}\n\n{sentence}\n\n{markdown_table(['run', *pools], rows)}"


def open_parts(parts: Parts) -> str:
    """The parts that are not done, with the reason."""
    lines = []
    for name, record in parts.items():
        if record["status"] != "done":
            lines.append(f"- {name}: {record['status']}")
            lines += [f"      {word}" for word in record.get("last_words", ())[-5:]]
    return "## Not done\n\n" + "\n".join(lines) if lines else ""
