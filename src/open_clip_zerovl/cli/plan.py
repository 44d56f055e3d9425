"""The command line of `zerovl plan` (see program.py).

It takes a whole `python -m training.main` command line. Flags on which neither time nor memory nor data depend are ignored and
listed in the report as "passed over".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from open_clip_zerovl.core.errors import UserError, argparse_sentence
from open_clip_zerovl.core.flags import add_flags, flags_of
from open_clip_zerovl.core.lazy import load_open_clip
from open_clip_zerovl.recipe.arguments import check_known
from open_clip_zerovl.recipe.flags import SECTIONS, AllFlags, OpenClipFlags, values_of


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sentence = argparse_sentence(message, self._option_string_actions, "zerovl plan --help")
        raise UserError(sentence)


def run_plan(words: Sequence[str]) -> int:
    """Print the plan of a training with these words; 1 if something is missing."""
    values = parse_plan(words)
    load_open_clip()
    from open_clip_zerovl.plan.batching import PlanSettings
    from open_clip_zerovl.plan.make import make_plan
    from open_clip_zerovl.plan.report import report

    as_json = values.pop("json")
    settings = PlanSettings(**values)
    plan = make_plan(
        settings, say=lambda line: print(f"zerovl plan: {line} ...", file=sys.stderr, flush=True)
    )
    print(json.dumps(plan.as_dict(), indent=1) if as_json else report(plan))
    return 1 if plan.data.missing else 0


def parse_plan(argv: Sequence[str]) -> dict[str, Any]:
    """The values of `PlanSettings`, and `json`.

    Raises:
        UserError: a flag without a value, a value of the wrong kind, a flag that training does not have, a word that belongs
            to no flag.
    """
    words = [word for word in argv if word != "--"]
    known, rest = _parser().parse_known_args(words)
    if known.model_config is not None:
        from open_clip_zerovl.models.model_file import register_model_file

        name = register_model_file(known.model_config)
        if known.model not in (None, name):
            raise UserError(
                f"--model {known.model} and --model-config {known.model_config} are two models: give one of them"
            )
        known.model = name
    if rest and not _is_flag(rest[0]):
        raise UserError(f"unexpected argument {rest[0]!r}; write it as --flag value")
    values = {name: value for name, value in values_of(known).items() if value is not None}
    reasons = {
        each.option: each.planned for each in flags_of(AllFlags) if isinstance(each.planned, str)
    }
    passed_over = dict.fromkeys(word.partition("=")[0] for word in rest if _is_flag(word))
    check_known([*passed_over], [each.option for each in flags_of(AllFlags)], "zerovl train --help")
    if known.model is None:
        raise UserError("--model is required; `zerovl plan --help` lists the flags")
    values["passed_over"] = tuple(
        f"{flag} ({reasons[flag]})" if flag in reasons else flag for flag in passed_over
    )
    if "effective_batch" in values:
        values.setdefault("dga_retain", "auto")  # B, K and R are chosen together
    patch_dropout = values.pop("force_patch_dropout", None)
    values.setdefault("token_drop", patch_dropout)
    return values


def _is_flag(word: str) -> bool:
    return word.startswith("--") and not re.fullmatch(r"-+[\d.].*", word)


def _parser() -> argparse.ArgumentParser:
    from open_clip_zerovl.plan.batching import PlanFlags

    parser = _Parser(
        prog="zerovl plan",
        usage="zerovl plan [--effective-batch N] [--assume GPU[:COUNT]] [--json] [--] TRAINING ARGUMENTS",
        description="Check a run before it starts: data, memory, time, disk. Takes the arguments of python -m training.main; "
        "flags not listed here change none of this. Exit status: 0, 1 if something is missing, 2 for bad input.",
        allow_abbrev=False,
    )
    add_flags(parser, (PlanFlags, OpenClipFlags, *SECTIONS), plan=True)
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    return parser
