"""`make gpu`: measurements that need a GPU, in 25 minutes on one GPU. A second call goes on where the first ended.

    python -m scripts.gpu [--wheels DIR] [--minutes 25] [--out docs/results] [--name NAME] [--only PART ...]
    python -m scripts.gpu --rehearse --out DIR        # all parts on the CPU, with tiny sizes

Each part runs in processes of its own and ends within 8 minutes. Each result is written at once:

    machine            the hardware and the rates that it reaches
    tests              the tests marked gpu: exactness in fp32, bf16 and fp16, SDPA's kernels, loss, memory, compile, resume
    steps              the steps at paper size: ours, open_clip's accumulation, the two-pass step
    steps-compiled     the same with the model compiled
    loss               the loss alone at up to 1,048,576 pairs
    plan               `zerovl plan` compared with a training
    demo               the emoji demo, if its data exists (--emoji; `python -m scripts.drawn emoji` makes it)

Results go to OUT/gpu-NAME.json and, as a page, to OUT/gpu-NAME.md; NAME is the GPU's. Nothing is installed or fetched: the
machine's own torch (2.11 or newer), torchvision, timm, transformers and numpy are used as they are, and Python packages that
it lacks are unpacked from the wheels in --wheels into WORK/site. To fetch the wheels on a machine with a network:

    python -m pip download --no-deps -d DIR open_clip_torch==3.3.0 "webdataset<=0.2.86" braceexpand ftfy wcwidth
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # works without an installation

from open_clip_zerovl.report.tables import markdown_table  # noqa: E402

PART_SECONDS = 8 * 60
LEAST_SECONDS = 45.0  # no part is started with less time left
EPOCHS = 20

# Module -> package. CARRIED are pure Python and can be brought as wheels; EXPECTED must be on the machine.
CARRIED = {
    "open_clip": "open_clip_torch",
    **{name: name for name in ("webdataset", "braceexpand", "ftfy", "wcwidth")},
}
EXPECTED = {
    "torch": "torch", "torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "numpy": "numpy",
    "pandas": "pandas", "PIL": "pillow", "safetensors": "safetensors", "tqdm": "tqdm", "tensorboard": "tensorboard",
    "sklearn": "scikit-learn", "matplotlib": "matplotlib", "pytest": "pytest", "pytest_timeout": "pytest-timeout",
}  # fmt: skip


class Stop(Exception):
    """An error that is shown as a sentence."""


@dataclass(frozen=True)
class Part:
    """A part and the command that measures it.

    Attributes:
        command: after the Python interpreter; `{have}` is replaced by the keys measured before.
        reads: "results" (lines RESULT {...}), "pytest" (lines of -vv), or "ending" (the exit status only).
        needs: a file without which the part is left out, and a sentence on how to make it.
    """

    name: str
    command: tuple[str, ...]
    reads: str = "results"
    needs: tuple[Path, str] | None = None


def parts(options: argparse.Namespace) -> list[Part]:
    """All parts, the most important first."""
    rehearse = ["--rehearse"] if options.rehearse else []

    def measured(part: str, *more: str) -> tuple[str, ...]:
        return ("-m", "scripts.bench.gpu_parts", part, *rehearse, *more, "--have", "{have}")

    emoji = (
        options.emoji / "bert" / "vocab.txt",
        f"python -m scripts.drawn emoji --out {options.emoji}",
    )
    device = "cpu" if options.rehearse else "cuda"
    workers = "0" if options.rehearse else "4"
    demo = [
        "-m", "scripts.demo", "--data", str(options.emoji), "--out", str(options.work / "demo"),
        "--epochs", "1" if options.rehearse else str(EPOCHS), "--", "--device", device, "--workers", workers,
    ]  # fmt: skip
    tests = ["-m", "pytest", "-vv", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    if (
        options.rehearse
    ):  # the compiler takes minutes on a CPU; the slow tier has the same test without a GPU
        tests += ["--deselect", "tests/gpu/test_compile.py"]
    return [
        Part("machine", measured("machine")),
        Part("tests", (*tests, "{have}"), "pytest"),
        Part("steps", measured("steps")),
        Part("steps-compiled", measured("steps", "--compile")),
        Part("loss", measured("loss")),
        Part("plan", measured("plan")),
        Part("demo", tuple(demo), "ending", emoji),
    ]


@dataclass
class Results:
    """The results so far: part -> {"status", "seconds", "results": {key: values}}; written to the disk after every change."""

    file: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Results:
        """
        Raises:
            Stop: a file that holds something else.
        """
        if not file.is_file():
            return cls(file)
        try:
            return cls(file, json.loads(file.read_text(encoding="utf-8"))["parts"])
        except (ValueError, KeyError, TypeError) as failure:
            raise Stop(
                f"{file} was not written by this program ({failure}); move it away, or give another --name"
            ) from None

    def part(self, name: str) -> dict[str, Any]:
        return self.parts.setdefault(name, {"status": "begun", "seconds": 0.0, "results": {}})

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for file, content in (
            (self.file, json.dumps({"parts": self.parts}, indent=1) + "\n"),
            (self.file.with_suffix(".md"), page(self.parts)),
        ):
            scratch = file.with_name(f".{file.name}.part")
            scratch.write_text(content, encoding="utf-8")
            scratch.replace(file)


# ---------------------------------------------------------------------------------------------------------------------
# Packages
# ---------------------------------------------------------------------------------------------------------------------


def missing_packages(site: Path) -> dict[str, str]:
    """Modules that can be imported neither here nor from `site`: module -> package."""
    unpacked = {path.name for path in site.iterdir()} if site.is_dir() else set()
    return {
        module: package
        for module, package in {**EXPECTED, **CARRIED}.items()
        if module not in unpacked
        and f"{module}.py" not in unpacked
        and importlib.util.find_spec(module) is None
    }


def unpack_wheels(wheels: Path | None, site: Path) -> None:
    """Unpack missing packages from a folder of wheels.

    Raises:
        Stop: packages that are neither installed nor in the folder.
    """
    missing = missing_packages(site)
    if wheels is not None and missing:
        if not wheels.is_dir():
            raise Stop(f"--wheels {wheels} is not a folder; give the one that holds the .whl files")
        there = {path.name.split("-")[0].lower().replace("_", "-") for path in wheels.glob("*.whl")}
        carried = [
            package for package in missing.values() if package.lower().replace("_", "-") in there
        ]
        if carried:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--find-links",
                str(wheels),
            ]
            done = subprocess.run(
                [*pip, "--target", str(site), *carried], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise Stop(
                    f"pip could not unpack {', '.join(carried)}: {done.stderr.strip().splitlines()[-1]}"
                )
        missing = missing_packages(site)
    if missing:
        raise Stop(
            f"this machine's Python ({sys.executable}) has no {', '.join(missing.values())}; fetch them where there is a "
            "network (python -m pip download --no-deps -d DIR NAME ...) and give --wheels DIR"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------

PYTEST_LINE = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b")


def command_of(part: Part, have: Sequence[str]) -> list[str]:
    """The command, without the keys that were measured before."""
    words = list(part.command)
    if "{have}" in words:
        place = words.index("{have}")
        passed = [f"--deselect={key}" for key in have] if part.reads == "pytest" else list(have)
        words[place : place + 1] = passed
    return [sys.executable, *words]


def result_in(line: str, reads: str) -> tuple[str, dict[str, Any]] | None:
    """The key and the values of a line with a result, None for any other line."""
    if reads == "results" and line.startswith("RESULT "):
        values = json.loads(line.removeprefix("RESULT "))
        return values.pop("key"), values
    if reads == "pytest" and (found := PYTEST_LINE.match(line)):
        return found[1], {"outcome": found[2].lower()}
    return None


def measured_before(part: Part, record: dict[str, Any]) -> list[str]:
    """Keys that need not be measured again: all but tests that failed."""
    return [
        key
        for key, values in record["results"].items()
        if values.get("outcome", "passed") in ("passed", "skipped")
    ]


def run_part(
    part: Part, results: Results, seconds: float, environment: dict[str, str], log: Path
) -> None:
    """Run a part for at most `seconds` and write each result; earlier results are not measured again."""
    record = results.part(part.name)
    have = measured_before(part, record)
    before, start = record["seconds"], time.monotonic()
    record["status"] = "begun"
    lines: queue.Queue[str | None] = queue.Queue()
    child = subprocess.Popen(
        command_of(part, have), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("a", encoding="utf-8") as file:
            while (left := seconds - (time.monotonic() - start)) > 0:
                try:
                    line = lines.get(timeout=left)
                except queue.Empty:
                    break
                if line is None:
                    break
                file.write(line)
                file.flush()
                if (found := result_in(line, part.reads)) is not None:
                    record["results"][found[0]] = found[1]
                    record["seconds"] = round(before + time.monotonic() - start, 1)
                    results.write()
                    values = ", ".join(f"{name} {cell(value)}" for name, value in found[1].items())
                    print(f"  {found[0]}: {values[:160]}", flush=True)
            if left <= 0 or child.poll() is None:
                try:
                    child.wait(timeout=max(0.1, min(20.0, left)))
                except subprocess.TimeoutExpired:
                    record["status"] = "stopped at its limit; a second call goes on"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        record["seconds"] = round(before + time.monotonic() - start, 1)
        if record["status"] == "begun":
            record["status"] = (
                "done" if child.returncode == 0 else f"ended with status {child.returncode}"
            )
            if child.returncode != 0:
                record["last_words"] = log.read_text(encoding="utf-8").strip().splitlines()[-25:]
        results.write()


def collect_demo(record: dict[str, Any], work: Path) -> None:
    """The demo's table, from its folder."""
    file = work / "demo" / "compare" / "compare.json"
    measures = json.loads(file.read_text(encoding="utf-8"))["measures"] if file.is_file() else {}
    pools = {
        pool: measures[pool]["sides"] for pool in ("within", "across", "mixed") if pool in measures
    }
    for name in pools.get("within", ()):
        record["results"][name] = {pool: sides[name]["value"] for pool, sides in pools.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

ABOUT = """Made by `make gpu` (`scripts/gpu.py`). Steps take the gradient only, without optimizer and data loading; `ratio to \
plain` is to plain training's time on the same samples. The paper's 14M recipe in 24 hours on one GPU needs 3,300 samples/s. \
RSUMs are of held-out pairs, 0 to 600."""


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a table of each part's results, and the parts that are not done with the reason."""
    machine = parts.get("machine", {}).get("results", {}).get("machine", {})
    sections = [f"# On {machine.get('device', 'a GPU')}", ABOUT]
    for name, record in parts.items():
        if record["results"]:
            sections.append(f"## {name.capitalize()}\n\n{table(record['results'])}")
    waiting = []
    for name, record in parts.items():
        if record["status"] != "done":
            waiting += [
                f"- {name}: {record['status']}",
                *(f"      {word}" for word in record.get("last_words", ())[-5:]),
            ]
    if waiting:
        sections.append("## Not done\n\n" + "\n".join(waiting))
    return "\n\n".join(sections) + "\n"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each result, a column for each of their values; tests are counted, and only those that failed have a row."""
    outcomes = Counter(values["outcome"] for values in results.values() if "outcome" in values)
    rows = {key: values for key, values in results.items() if values.get("outcome") != "passed"}
    columns = list(dict.fromkeys(name for values in rows.values() for name in values))
    cells = [[key, *(cell(values.get(name)) for name in columns)] for key, values in rows.items()]
    words = (
        [", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())] if outcomes else []
    )
    words += (
        [markdown_table(["", *(name.replace("_", " ") for name in columns)], cells)] if rows else []
    )
    return "\n\n".join(words)


def cell(value: Any) -> str:
    """A value of a result in few characters."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
    return (
        " to ".join(map(cell, value))
        if isinstance(value, list)
        else ""
        if value is None
        else str(value)
    )


def name_here(rehearse: bool) -> str:
    """The GPU's name in the form of a file name; "rehearsal" on the CPU.

    Raises:
        Stop: there is no GPU.
    """
    if rehearse:
        return "rehearsal"
    import torch

    if not torch.cuda.is_available():
        raise Stop(
            "there is no CUDA device here; --rehearse (make gpu REHEARSE=1) runs all parts on the CPU with tiny sizes"
        )
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def run(options: argparse.Namespace) -> int:
    """Run the parts that are not done yet, until the time is over; returns the exit status."""
    deadline = time.monotonic() + 60 * options.minutes
    options.work = options.work.absolute()
    options.out, options.emoji = options.out.absolute(), options.emoji.absolute()
    site = options.work / "site"
    unpack_wheels(options.wheels, site)
    options.name = options.name or name_here(options.rehearse)
    results = Results.read(options.out / f"gpu-{options.name}.json")
    paths = [ROOT / "src", ROOT, site]
    before = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **({"ZEROVL_REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""} if options.rehearse else {}),
    }
    chosen = [part for part in parts(options) if not options.only or part.name in options.only]
    for part in chosen:
        record = results.part(part.name)
        if record["status"] == "done":
            continue
        if part.needs is not None and not part.needs[0].exists():
            record["status"] = f"left out: there is no {part.needs[0].parent}; {part.needs[1]}"
            results.write()
            print(f"{part.name}: {record['status']}", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < min(LEAST_SECONDS, 30 * options.minutes):
            print(
                f"{part.name}: the {options.minutes:g} minutes are over; call again to go on",
                flush=True,
            )
            break
        print(f"{part.name} (at most {min(PART_SECONDS, left):.0f} s)", flush=True)
        run_part(
            part, results, min(PART_SECONDS, left), environment, options.work / f"{part.name}.log"
        )
        if part.name == "demo":
            collect_demo(record, options.work)
            results.write()
        print(f"{part.name}: {record['status']} ({record['seconds']:.0f} s)", flush=True)
    print(f"\n{page(results.parts)}\n{results.file}\n{results.file.with_suffix('.md')}", flush=True)
    return exit_status([results.part(part.name) for part in chosen])


def exit_status(records: Sequence[dict[str, Any]]) -> int:
    """0: all parts are done; 1: a part failed; 3: a part is not finished."""
    failed = any(record["status"].startswith("ended") for record in records)
    waiting = any(record["status"].startswith(("begun", "stopped")) for record in records)
    return 1 if failed else 3 if waiting else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="wheels of packages that this machine lacks"
    )
    parser.add_argument(
        "--emoji",
        type=Path,
        default=Path("data/emoji"),
        metavar="DIR",
        help="output of `python -m scripts.drawn emoji`",
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="time for this call (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "gpu",
        metavar="DIR",
        help="scratch files and logs",
    )
    parser.add_argument("--name", help="name in the result's files (default: the GPU's)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="only these parts")
    options = parser.parse_args(argv)
    known = ("machine", "tests", "steps", "steps-compiled", "loss", "plan", "demo")
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"there is no part {unknown[0]!r}; give one of {', '.join(known)}")
    try:
        return run(options)
    except Stop as sentence:
        print(f"gpu: {sentence}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
