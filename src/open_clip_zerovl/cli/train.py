"""`zerovl train` and `zerovl plan`: the training program, as a process in this one's place (see launch.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.launch import training_command

_GPUS = "--gpus"


def become_training(words: Sequence[str]) -> NoReturn:
    """Put the training program in this process's place: signals, terminal and exit status are its own.

    Args:
        words: those of `python -m training.main`, and `--gpus N`.

    Raises:
        UserError: `--gpus` without a number, or a training program that is not whole.
    """
    gpus, arguments = take_gpus(words)
    asks_help = any(word in ("-h", "--help") for word in arguments)
    command = training_command(arguments, 1 if asks_help else gpus)
    if asks_help:
        print(
            "zerovl train [--gpus N] FLAGS: one process for each GPU that CUDA_VISIBLE_DEVICES leaves visible, or N; with "
            "--device cpu one, or N.\nThe flags are those of python -m training.main:\n",
            flush=True,
        )
    os.execv(command[0], command)


def become_plan(words: Sequence[str]) -> NoReturn:
    """Put a training in this process's place that takes two steps and prints what the whole run takes.

    Args:
        words: those of `zerovl train`.
    """
    become_training(["--plan", *(word for word in words if word != "--")])


def take_gpus(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of `--gpus` (None if it is not given), and the other words.

    Raises:
        UserError: it is not a positive number.
    """
    gpus = None
    rest = []
    left = list(words[1:] if words[:1] == ["--"] else words)
    while left:
        word = left.pop(0)
        flag, has_value, value = word.partition("=")
        if flag != _GPUS:
            rest.append(word)
            continue
        value = value if has_value else left.pop(0) if left else ""
        if not value.isdecimal() or int(value) < 1:
            raise UserError(
                f"{_GPUS} {value}".strip() + ": give the number of processes, 1 or more"
            )
        gpus = int(value)
    return gpus, rest
