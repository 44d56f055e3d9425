"""The flags of commands that encode with one model or several, and the `Encoder`s that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from open_clip_zerovl.cli.values import natural

if TYPE_CHECKING:
    from open_clip_zerovl.checkpoints.loading import Encoder


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """What a command asks about its one model besides the model itself and the batch size."""
    parser.add_argument("--model-name", metavar="NAME", help="model of a checkpoint without params.txt beside it")
    parser.add_argument("--workers", type=natural, default=0, help="loader processes a rank (default %(default)s)")
    add_models_flags(parser)


def add_models_flags(parser: argparse.ArgumentParser) -> None:
    """What a command asks about all its models at once; exported folders among them need none of it."""
    parser.add_argument(
        "--model-config", metavar="FILE.json", help="one's own model of a checkpoint without params.txt, as in training"
    )
    parser.add_argument("--text-model", metavar="DIR", help="folder of the HF text tower of training checkpoints")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda where there is one)")


def encoder_of(
    arguments: argparse.Namespace, model: str, batch_size: int | None = None, *, one_of_several: bool = False
) -> Encoder:
    """The encoder of a model with a command's flags: those above, `--batch-size` and, where it has it, `--workers`.

    Args:
        batch_size: in place of `--batch-size`.
        one_of_several: the flags are of the training checkpoints among the command's models; an exported folder beside them
            has its own config and text tower. Else a folder is given them too, and refuses them.
    """
    from open_clip_zerovl.checkpoints.loading import Encoder

    flags = not one_of_several or Path(model).expanduser().is_file()
    return Encoder(
        model,
        model_name=(own_model(arguments.model_config) or getattr(arguments, "model_name", None)) if flags else None,
        text_model=arguments.text_model if flags else None,
        device=arguments.device,
        batch_size=batch_size or arguments.batch_size,
        workers=getattr(arguments, "workers", 0),
    )


def own_model(file: str | None) -> str | None:
    """The name of the model of `--model-config`, which is registered; None without the flag."""
    if file is None:
        return None
    from open_clip_zerovl.models.model_file import register_model_file

    return register_model_file(file)
