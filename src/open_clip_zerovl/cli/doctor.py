"""The command line of `zerovl doctor` (see program.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json


def add_doctor(commands) -> None:
    """`zerovl doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="whether versions, devices and limits here are fit for training",
        description="One page to paste into an issue: versions against what is supported, a forward pass and a DGA step on "
        "every device, process groups, memory and limits. Exit status 1 where something is wrong.",
    )
    doctor.add_argument("--logs", default="logs", metavar="DIR", help="where runs would be kept (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
    from open_clip_zerovl.plan.doctor import examine, page

    findings = examine(arguments.logs)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(page(findings))
    return int(any(finding.problem is not None for finding in findings))
