"""`make gpu`: what only a GPU can show, in the order of its value, in one process on one GPU.

    python -m scripts.gpu [--seconds 480] [--out docs/results] [--only PART ...]
    python -m scripts.gpu --rehearse --out DIR        # every part on the CPU, with tiny sizes

    part         seconds on an H100
{parts}
The first call of 480 seconds ends with `training`, a second one of 200 seconds does the rest. Each result is written at once,
to WORK/gpu-NAME.json, and copied to OUT with a page, OUT/gpu-NAME.md; NAME is the GPU's. The next call continues after the
last result, also from OUT alone. A failure is a result; --only PART measures it again. Exit status:

    0   everything is measured
    1   everything is measured, and something failed
    2   it cannot begin: a package or the GPU is missing
    3   the time is over; call again to continue
    75  CUDA's context is broken, or a measurement hung: call again at once, it goes on behind it (`make gpu` does)

The machine's own torch (2.11 or newer), torchvision, timm, transformers and numpy are used. Packages that it lacks come from a
folder of wheels, which `make gpu WHEELS=DIR` unpacks into WORK/site without an index. To fetch them on a machine with a
network, for Python 3.12 on the GPU's:

    python -m pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 -d DIR \\
        open_clip_torch==3.3.0 webdataset==0.2.86 simplejpeg==1.9.0 ftfy==6.3.1 braceexpand==0.1.7 wcwidth==0.2.14 memeff==0.3.1
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]  # works without an installation

from open_clip_zerovl.core.errors import UserError  # noqa: E402
from open_clip_zerovl.core.files import digest_of, write_atomically  # noqa: E402
from scripts.tables import markdown_table  # noqa: E402

# Functions of scripts/bench/gpu_parts.py: (seconds on an H100, what they answer).
PARTS = {
    "machine": (40, "rates of products and copies"),
    "exactness": (30, "tests/gpu/test_exactness.py: fp32, bf16, fp16, attention's kernels, GradScaler"),
    "gradients": (20, "errors of a step's gradient at paper size against one graph"),
    "steps": (60, "speed and memory of eager steps: plain training, ours, open_clip's"),
    "waits": (5, "where a step waits for the GPU, and the longest kernels of a micro-batch"),
    "loss": (12, "the loss alone, to 262,144 pairs"),
    "blocks": (75, "the same steps with the towers' blocks compiled"),
    "training": (155, "`zerovl train` from tars, compiled as the 14M recipe is, stopped, and resumed from an earlier step"),
    "tests": (70, "the other tests of tests/gpu: compile, resume, loss and memory"),
    "ranks": (50, "gradient errors of two ranks that share the GPU"),
    "plan": (35, "`zerovl plan` compared with that training"),
}  # fmt: skip
LEAST_SHARE = 0.5  # of a part's estimate: with less time left it is not begun
MOST_ATTEMPTS = 3  # a measurement that ends the process is given up after as many
BROKEN, TIME_OVER = 75, 3
HANGS_AFTER = 120.0  # seconds without a result


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


class Session:
    """Measures and writes results, each at once; those of an earlier call with the same programs are not measured again.

    Attributes:
        programs: a digest of this project's programs, with the tests that are parts.
        parts: part -> {"results": {key: values}, "seconds", "done"}.
        attempts: "part, key" -> begun measurements without a result.
        part: the part that is being measured.
        deadline: the end of this call on the monotonic clock.
        rehearse: on the CPU, with tiny sizes.
        work: a folder for scratch files.
    """

    def __init__(
        self, name: str, work: Path, out: Path, seconds: float, *, rehearse: bool = False
    ) -> None:
        self.files = [folder / f"gpu-{name}.json" for folder in dict.fromkeys((work, out))]
        self.work, self.rehearse = work, rehearse
        self.deadline = time.monotonic() + seconds
        self.parts: dict[str, dict[str, Any]] = {}
        self.attempts: dict[str, int] = {}
        self.part = ""
        self._limit: tuple[float, str] | None = None  # a result by then, or its key hangs
        self._lock = threading.RLock()
        folders = (ROOT / "src", ROOT / "scripts", ROOT / "tests" / "gpu")
        programs = [path for folder in folders for path in folder.rglob("*.py")]
        self.programs = digest_of([path.read_text(encoding="utf-8") for path in sorted(programs)])
        for file in self.files:
            state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if state.get("programs") == self.programs:
                vars(self).update(state)
                break

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of the current part."""
        return self.parts[self.part]["results"]

    def save(self) -> None:
        """Write the state and the page."""
        state = {"programs": self.programs, "parts": self.parts, "attempts": self.attempts}
        for file in self.files:
            write_atomically(file, json.dumps(state, indent=1) + "\n")
        write_atomically(self.files[-1].with_suffix(".md"), page(self.parts))

    def write(self, key: str, **values: Any) -> None:
        """Write a result of the current part, and end the process if CUDA's context is broken."""
        with self._lock:
            self._limit = None
            self.attempts.pop(f"{self.part}, {key}", None)
            self.results[key] = values
            self.save()
        print(f"  {key}: {cell(values)[:200]}", flush=True)
        import torch

        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError as failure:
            print(f"  {failure}", file=sys.stderr, flush=True)
            os._exit(BROKEN)

    def begin(self, key: str, limit: float = HANGS_AFTER) -> bool:
        """Expect a result within `limit` seconds.

        Returns:
            False if there is one already, or if the process has ended too often in it.
        """
        if key in self.results:
            return False
        place = f"{self.part}, {key}"
        with self._lock:
            if self.attempts.get(place, 0) >= MOST_ATTEMPTS:
                self.write(key, error=f"ended the process {MOST_ATTEMPTS} times")
                return False
            self.attempts[place] = self.attempts.get(place, 0) + 1
            self.save()
            self._limit = (time.monotonic() + limit * (10 if self.rehearse else 1), key)
        return True

    def measure(self, key: str, call: Callable[[], Any], limit: float = HANGS_AFTER) -> None:
        """Write what `call` returns, or its failure, unless the result is there already."""
        if self.begin(key, limit):
            try:
                values = call()
            except Exception as failure:
                values = {"error": f"{type(failure).__name__}: {failure}"[:1000]}
            self.write(key, **values)

    def watch(self) -> None:
        """End the process when its time is over, or a measurement hangs."""
        while True:
            time.sleep(0.5)
            with self._lock:
                if time.monotonic() > self.deadline:
                    if self._limit:
                        self.attempts.pop(f"{self.part}, {self._limit[1]}", None)
                        self.save()
                    print("the time is over; call again to continue", flush=True)
                    os._exit(TIME_OVER)
                if self._limit and time.monotonic() > self._limit[0]:
                    faulthandler.dump_traceback()
                    self.results[self._limit[1]] = {"error": "hung"}
                    self.save()
                    os._exit(BROKEN)

    def run(self, name: str, part: Callable[[Session], None]) -> None:
        """Measure what a part lacks."""
        self.part = name
        record = self.parts.setdefault(name, {"results": {}, "seconds": 0.0, "done": False})
        before, start = record["seconds"], time.monotonic()
        print(f"{name}: {PARTS[name][1]}", flush=True)
        try:
            part(self)
        except Exception as failure:  # outside of a measurement
            self.write(name, error=f"{type(failure).__name__}: {failure}"[:400])
        record["seconds"] = round(before + time.monotonic() - start, 1)
        record["done"] = True
        self.save()


def failed(values: Mapping[str, Any]) -> bool:
    return "error" in values or values.get("outcome") == "failed"


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

MOST_COLUMNS = 8  # a result of more values gets a table of its own


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the results as Markdown: a table of each part, and the parts that are not done."""
    machine = parts.get("machine", {}).get("results", {}).get("machine", {})
    about = (
        "Made by `make gpu` (`scripts/gpu.py`). Steps take the gradient only, without optimizer and data loading. The paper's "
        "14M recipe in 24 hours on one GPU needs 3,300 samples/s."
    )
    sections = [f"# On {machine.get('device', 'a GPU')}", about]
    for name, record in parts.items():
        if record["results"]:
            what = f"{PARTS[name][1][:1].upper()}{PARTS[name][1][1:]} ({record['seconds']:.0f} s)."
            sections += [f"## {name.capitalize()}", what, table(record["results"])]
    if waiting := [name for name in PARTS if not parts.get(name, {}).get("done")]:
        sections.append(f"Not done: {', '.join(waiting)}.")
    return "\n\n".join(sections) + "\n"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render a row for each result, or for each of its values if there are many, and count passed tests."""
    outcomes = Counter(values["outcome"] for values in results.values() if "outcome" in values)
    parts = [", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())]
    rows = {key: values for key, values in results.items() if values.get("outcome") != "passed"}
    long = {key: values for key, values in rows.items() if len(values) > MOST_COLUMNS}
    short = {key: values for key, values in rows.items() if key not in long}
    columns = list(dict.fromkeys(name for values in short.values() for name in values))
    cells = [[key, *(cell(values.get(name)) for name in columns)] for key, values in short.items()]
    spoken = [name.replace("_", " ") for name in columns]
    parts += [markdown_table(["", *spoken], cells)] if short else []
    for key, values in long.items():
        pairs = [[name.replace("_", " "), cell(value)] for name, value in values.items()]
        parts.append(markdown_table([key, ""], pairs))
    return "\n\n".join(filter(None, parts))


def cell(value: Any) -> str:
    """Write a value of a result in few characters."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(cell, value))
    return "" if value is None else str(value).replace("\n", " ").replace("|", "/")


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measure what is not measured yet, until the time is over, and return the exit status.

    Raises:
        UserError: there is no GPU, or a package is missing.
    """
    work, out = options.work.absolute(), options.out.absolute()
    site = str(work / "site")
    if options.rehearse:
        os.environ |= {"ZEROVL_REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [*sys.path[:3], site, os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(3, site)
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise UserError(
            "there is no CUDA device here; make gpu REHEARSE=1 runs every part on the CPU with tiny sizes"
        )
    name = "rehearsal" if options.rehearse else torch.cuda.get_device_name(0)
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    session = Session(name, work, out, options.seconds, rehearse=options.rehearse)
    threading.Thread(target=session.watch, daemon=True).start()
    try:
        from scripts.bench import gpu_parts
    except ModuleNotFoundError as error:
        raise UserError(
            f"this machine's Python ({sys.executable}) has no {error.name}; fetch the wheels where there is a network "
            "(`python -m scripts.gpu --help` shows how) and give make gpu WHEELS=DIR"
        ) from error

    for part in options.only or PARTS:
        record = session.parts.get(part)
        if record and options.only:
            kept = {key: values for key, values in record["results"].items() if not failed(values)}
            record.update(results=kept, done=False)
        if record and record["done"]:
            continue
        left = session.deadline - time.monotonic()
        if left < LEAST_SHARE * PARTS[part][0]:
            print(f"{part}: {left:.0f} s are left; call again to continue", flush=True)
            return TIME_OVER
        session.run(part, getattr(gpu_parts, part))
    print(f"\n{page(session.parts)}\n{session.files[-1].with_suffix('.md')}", flush=True)
    return int(
        any(failed(v) for record in session.parts.values() for v in record["results"].values())
    )


def main(argv: Sequence[str] | None = None) -> int:
    listed = "".join(f"    {name:<12} {took:>3}  {what}\n" for name, (took, what) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.replace("{parts}", listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    add("--seconds", type=float, default=480.0, help="time for this call (default %(default)g)")
    add("--out", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    add(
        "--work",
        type=Path,
        default=ROOT / "build/gpu",
        metavar="DIR",
        help="state and scratch files",
    )
    add("--only", nargs="+", choices=PARTS, metavar="PART", help="only these parts, with what failed")  # fmt: skip
    try:
        return run(parser.parse_args(argv))
    except UserError as sentence:
        print(f"gpu: {sentence}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
