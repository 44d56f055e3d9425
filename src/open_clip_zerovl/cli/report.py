"""The command line of `zerovl report` (see program.py)."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_report(commands) -> None:
    """Add `zerovl report`."""
    report = commands.add_parser(
        "report",
        help="a training run as one page: losses, retrieval, what was lost, settings",
        description="Write RUN/run.html from RUN/record.jsonl. Training does so at its end; this does it for a run that "
        "is still going on or was killed.",
    )
    report.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run, logs/NAME")
    report.set_defaults(run=_run_report)


def _run_report(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.report.run_page import write_run_page

    print(f"Page: {write_run_page(arguments.run_folder)}")
