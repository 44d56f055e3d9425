"""The device of a run, and the precision that it allows."""

from __future__ import annotations

import argparse
import logging

import torch
from open_clip_train.distributed import is_device_available

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.recipe.step import precision_on


def check_device(args: argparse.Namespace) -> None:
    """
    Raises:
        UserError: a `--device` that torch does not know.
    """
    try:
        torch.device(args.device)
    except RuntimeError as error:
        raise UserError(f"torch knows no --device {args.device}; give cpu, cuda or cuda:NUMBER") from error


def settle_device(args: argparse.Namespace, *, recipe: bool) -> None:
    """Warn if a run asks for a GPU and trains on the CPU, and take fp32 instead of `amp` there.

    Args:
        args: `precision` is changed.
        recipe: whether any of our flags was given; if not, the run is open_clip's own and keeps its precision.
    """
    kind = args.device.partition(":")[0]
    if kind != "cpu":
        available, known = is_device_available(kind)
        if available or not known:
            return
        logging.warning(f"There is no {kind} device here: this run trains on the CPU, as with --device cpu.")
    precision = precision_on("cpu", args.precision)
    if precision == args.precision:
        return
    if recipe:
        logging.warning(
            f"--precision {args.precision} is several times slower than fp32 on a CPU: fp32 is taken instead."
        )
        args.precision = precision
    else:
        logging.warning(
            f"--precision {args.precision} is several times slower than fp32 on a CPU; give --precision fp32."
        )
