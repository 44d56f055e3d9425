"""Words and flags of several commands, and the encoders that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from open_clip_zerovl.checkpoints.encoder_flags import EncoderFlags
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import add_settings, settings_from

if TYPE_CHECKING:
    from open_clip_zerovl.checkpoints.loading import Encoder

MODEL = "an exported folder, local-dir:/abs/folder, a training checkpoint (.pt), or open_clip's NAME/pretrained"
MODELS = "exported folders, training checkpoints, NAME/pretrained"


def add_encoder(
    parser: argparse.ArgumentParser, flags: type = EncoderFlags, without: tuple[str, ...] = ()
) -> None:
    """Add the flags of a command's encoders."""
    parser.add_argument(
        "--model-config",
        metavar="FILE.json",
        help="one's own model of a checkpoint without params.txt, as in training",
    )
    add_settings(parser, flags, without=without)


def encoder_of(
    arguments: argparse.Namespace, model: str, *, one_of_several: bool = False
) -> Encoder:
    """The encoder of a model with a command's flags.

    Args:
        one_of_several: the flags are of the training checkpoints among the command's models; an exported folder beside them
            has its own config and text tower. Else a folder is given them too, and refuses them.
    """
    from open_clip_zerovl.checkpoints.loading import Encoder

    names: dict[str, str | None] = {"model_name": None, "text_model": None}
    if not one_of_several or Path(model).expanduser().is_file():
        named = own_model(arguments.model_config) or getattr(arguments, "model_name", None)
        names = {"model_name": named, "text_model": arguments.text_model}
    return settings_from(Encoder, arguments, model=model, **names)


def encoders_of(arguments: argparse.Namespace) -> dict[str, Encoder]:
    """The encoders of a command's models, by the names that these have: [NAME=]MODEL."""
    return {
        name: encoder_of(arguments, model, one_of_several=True)
        for name, model in name_models(arguments.models).items()
    }


def own_model(file: str | None) -> str | None:
    """The name of the model of `--model-config`, which is registered; None without the flag."""
    if file is None:
        return None
    from open_clip_zerovl.models.model_file import register_model_file

    return register_model_file(file)


def name_models(models: Sequence[str]) -> dict[str, str]:
    """Names of models, given as `NAME=MODEL` or taken from the path.

        ["random=a.pt", "logs/run/checkpoints/epoch_9.pt"]  ->  {"random": "a.pt", "run": "logs/run/checkpoints/epoch_9.pt"}

    Raises:
        UserError: two models of one name, or one without a name.
    """
    named: dict[str, str] = {}
    for entry in models:
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        if not name:
            place = Path(path.removeprefix("local-dir:"))
            name = place.parent.parent.name if place.parent.name == "checkpoints" else place.stem
        if not name or not path or name in named:
            raise UserError(
                f"model {entry!r} needs a name of its own; write NAME={path or 'MODEL'}"
            )
        named[name] = path
    return named
