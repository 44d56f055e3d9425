"""The commands as Python functions: `pack`, `train`, `finetune`, `align`, `evaluate`, `search`.

Keyword arguments are the flags' names with underscores: `--test-share 0.1` is `test_share=0.1`, `--from` is `from_`. A call is
made into the words of the command and read by its parser, so that flags, defaults and refusals are those of the command. True
sets a switch; None and False leave a flag out; a list gives several values, a mapping KEY=VALUE each.

    packed = open_clip_zerovl.pack("photos", out="packed", test_share=0.1)
    tuned = open_clip_zerovl.finetune(from_="ViT-B-32/laion2b_s34b_b79k", data=packed, out="tuned")
    open_clip_zerovl.search(tuned, "photos", "a red house")
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from open_clip_zerovl.cli.program import Parser, define
from open_clip_zerovl.cli.results import Aligned, Hits, Packed, Run, Scores, Tuned
from open_clip_zerovl.cli.train import take_gpus
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.launch import follow_training
from open_clip_zerovl.recipe.arguments import REPEATED

Model = str | os.PathLike[str]


def pack(*inputs: Model, out: Model, **flags: Any) -> Packed:
    """Write pictures and captions as shards: `zerovl data pack`.

    Args:
        inputs: folders, tables, tars or addresses; `NAME=INPUT` makes a source of its own.
        out: folder to write.
        flags: those of the command.

    Raises:
        UserError: as the command's errors.
    """
    report = call("data pack", *inputs, out=out, **flags)
    return Packed(_absolute(out), report)


def train(*, name: str, logs: Model = "./logs/", **flags: Any) -> Run:
    """Train in a child process, whose lines are printed: `zerovl train`.

    An interrupt (KeyboardInterrupt) makes the training save a checkpoint and end. The same call goes on where it stopped, or
    returns at once where all epochs are done.

    Args:
        name, logs: the run's folder is logs/name.
        flags: those of `zerovl train --help`, open_clip's too, and `gpus`: the number of processes (default: one a GPU).
            `train_data` also takes the result of `pack`, with its held-out sets unless `retrieval_data` is given.

    Raises:
        UserError: the training failed; its last error is in the sentence.
    """
    data = flags.get("train_data")
    if isinstance(data, Packed):
        held_out = {"retrieval_data": data.held_out} if data.held_out else {}
        flags = held_out | flags | {"train_data": data.train_data}
    given = {"name": name, "logs": logs, "resume": "latest", **flags}
    processes, arguments = take_gpus(words_of(given, {f"--{flag}" for flag in REPEATED}))
    follow_training(arguments, processes, lambda line: print(line, flush=True))
    return Run(_absolute(Path(logs, name)))


def finetune(*, from_: Model, data: Model, out: Model, **flags: Any) -> Tuned:
    """Fine-tune a model on pairs: `zerovl finetune`. The same call goes on with one that was interrupted.

    Args:
        from_: the model to start from: a folder, a checkpoint, or open_clip's `NAME/TAG`.
        data: a folder of `pack`, or named sources.
        out: folder to write.
        flags: those of the command; `set={"lr": 1e-5}` replaces training flags.

    Raises:
        UserError: as the command's errors.
    """
    call("finetune", from_=from_, data=data, out=out, **flags)
    folder = _absolute(out)
    return Tuned(folder, _read(folder / "finetune.json"))


def align(*, image: Any, text: Any, data: Model, out: Model, **flags: Any) -> Aligned:
    """Train heads on two frozen encoders: `zerovl align`. The same call goes on with one that was interrupted.

    Args:
        image, text: an encoder each, or lists of encoders to compare.
        data: a folder of `pack`, or named sources.
        out: folder to write.
        flags: those of the command.

    Raises:
        UserError: as the command's errors.
    """
    call("align", image=image, text=text, data=data, out=out, **flags)
    folder = _absolute(out)
    return Aligned(folder, _read(folder / "align.json"))


def evaluate(model: Model, data: Model, task: str = "retrieval", **flags: Any) -> Scores:
    """Score a model: `zerovl retrieval`, or `zerovl zero-shot` with `task="zero-shot"`.

    Args:
        model: a folder, a checkpoint, `NAME/TAG`, or the result of `train`, `finetune` or `align`.
        data: sets, `NAME=SET::...`.
        flags: those of the command.

    Raises:
        UserError: as the command's errors.
    """
    if task not in TASKS:
        raise UserError(f"task={task!r} is not one of {', '.join(TASKS)}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        scores = call(task, model, data=data, **flags)
    return Scores(scores, printed.getvalue())


def search(model: Model, pictures: Model, words: str = "", **flags: Any) -> Hits:
    """Find pictures by words, by a picture (`image=FILE`), or by both: `zerovl search`.

    Args:
        model: as for `evaluate`.
        pictures: a folder of pictures, shards, or a table.
        flags: those of the command; `best=K` pictures are returned.

    Raises:
        UserError: as the command's errors.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        (result,) = call("search", model, pictures, words, **flags).values()
    return Hits(result.hits, result.pictures, printed.getvalue())


TASKS = ("retrieval", "zero-shot")


# ---------------------------------------------------------------------------------------------------------------------
# A call as a command line
# ---------------------------------------------------------------------------------------------------------------------


class _CallParser(Parser):
    typed = False

    def error(self, message: str) -> NoReturn:
        raise UserError(self.sentence(message))


def call(command: str, *words: Model, **flags: Any) -> Any:
    """Run a command with its words and flags, and return its result."""
    parser, run = define(command, _CallParser)
    repeated = {
        option
        for action in parser._actions
        if isinstance(action, argparse._AppendAction)
        for option in action.option_strings
    }
    line = words_of(flags, repeated)
    if words:
        line += ["--", *map(_word, words)]  # a word may begin with a dash
    return run(parser.parse_args(line))


def words_of(flags: Mapping[str, Any], repeated: Collection[str]) -> list[str]:
    """Keyword arguments as the words of a command line.

    Args:
        repeated: options that are given once for each of several values; others take all values after one.
    """
    line: list[str] = []
    for name, value in flags.items():
        option = "--" + name.removesuffix("_").replace("_", "-")
        if isinstance(value, Mapping):
            value = [
                key if setting is True else f"{key}={_word(setting)}"
                for key, setting in value.items()
            ]
        if value is None or value is False:
            continue
        if value is True:
            line.append(option)
        elif isinstance(value, (list, tuple)) and option not in repeated:
            line += [option, *map(_word, value)]
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            line += [f"{option}={_word(item)}" for item in values]
    return line


def _word(value: Any) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _absolute(folder: Model) -> Path:
    return Path(folder).expanduser().absolute()


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
