"""The CPU time of `zerovl data pack`: pictures a second of one core, and what a row costs.

JPEGs of 640 x 480 px (63 KB) are packed with their bytes kept, and shrunk to 256 px; then many rows that repeat a few pictures.
CPU time is that of all threads, so that other work on the machine matters little. The report is part of it; open_clip is
imported before.

    python scripts/bench/pack.py --pictures 1000 --rows 300000
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import open_clip.tokenizer  # noqa: F401  # its import is not measured

from open_clip_zerovl.prepare.pack.run import PackSettings, pack
from open_clip_zerovl.prepare.public.gather import Work
from support.tars import noise_jpeg


def seconds_of(table: Path, out: Path, settings: PackSettings) -> float:
    """CPU seconds of one call on a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    begin = time.process_time()
    pack([str(table)], out, settings, work=Work(threads=4, progress=False))
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        for number in range(arguments.pictures):
            (folder / f"in/{number}.jpg").write_bytes(noise_jpeg(number, 640, 480))
        lines = [json.dumps({"image": f"{n}.jpg", "caption": f"caption {n}"}) for n in range(arguments.pictures)]
        (folder / "in/pictures.jsonl").write_text("\n".join(lines) + "\n")
        few = max(1, arguments.pictures // 10)
        lines = [json.dumps({"image": f"{n % few}.jpg", "caption": f"caption {n}"}) for n in range(arguments.rows)]
        (folder / "in/rows.jsonl").write_text("\n".join(lines) + "\n")
        for round_ in range(arguments.rounds):
            kept = seconds_of(folder / "in/pictures.jsonl", folder / "out", PackSettings())
            shrunk = seconds_of(folder / "in/pictures.jsonl", folder / "out", PackSettings(max_side_px=256))
            rows = (
                seconds_of(folder / "in/rows.jsonl", folder / "out", PackSettings()) - kept * few / arguments.pictures
            )
            print(
                f"round {round_}: {arguments.pictures / kept:.0f} pictures/s a core with their bytes kept, "
                f"{arguments.pictures / shrunk:.0f} shrunk to 256 px, {rows / arguments.rows * 1e6:.0f} us a row"
            )


if __name__ == "__main__":
    main()
