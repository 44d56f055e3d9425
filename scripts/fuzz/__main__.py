"""Give generated files to every function that reads files, and count the outcomes.

    python -m scripts.fuzz [--examples 400] [--seconds 30] [--kinds tar picture] [--out docs/reliability.md]

Hypothesis draws the files (`inputs`), the same ones at each run unless a `--seed` is given; `readers` are the functions that
training and `zerovl` call. Each reading must work, end in a one-sentence error (`UserError`), or meet a bad sample, which is
replaced or reported. Anything else, such as a hang of 10 s or 2 GiB of memory, ends this program with the smallest such file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from scripts.fuzz.readers import KINDS
from scripts.fuzz.run import Tally, csv_lines, fuzz, prepare, table
from scripts.sections import replace_section


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=400, help="inputs of each kind")
    parser.add_argument("--seconds", type=float, default=30, help="time for each kind of input")
    parser.add_argument("--seed", type=int, help="draw other inputs than the fixed ones")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--out",
        type=Path,
        help="a page whose section between the marks `fuzz` is replaced; each reader's counts go to results/fuzz.csv beside it",
    )
    options = parser.parse_args()
    tally, begin = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-home-") as home:
        prepare(Path(home))
        for kind in options.kinds:
            fuzz(
                kind, tally, examples=options.examples, seconds=options.seconds, number=options.seed
            )
    minutes = (time.monotonic() - begin) / 60
    seeded = "" if options.seed is None else f" --seed {options.seed}"
    lines = [
        *table(tally),
        "",
        f"{sum(tally.values()):,} readings in {minutes:.1f} minutes (`python -m scripts.fuzz --examples {options.examples} "
        f"--seconds {options.seconds:g}{seeded}`), none of which ended in another way.",
    ]
    print("\n".join(lines))
    if options.out is not None:
        replace_section(options.out, "fuzz", lines[-1:])
        rows = options.out.parent / "results" / "fuzz.csv"
        rows.parent.mkdir(exist_ok=True)
        rows.write_text("\n".join(csv_lines(tally)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
