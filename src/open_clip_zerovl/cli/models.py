"""The commands that make models or look after runs: align, finetune, export, doctor, ..."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from open_clip_zerovl.align.request import AlignFlags
from open_clip_zerovl.cli.program import RunCommand
from open_clip_zerovl.cli.shared import add_encoder, encoder_of, own_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import (
    add_settings,
    flags_of,
    settings_from,
)
from open_clip_zerovl.core.lazy import load_open_clip
from open_clip_zerovl.evaluate.settings import CurveFlags
from open_clip_zerovl.finetune.flags import SETS, FinetuneFlags
from open_clip_zerovl.recipe.flags import TuningFlags


def finetune(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl finetune`."""
    parser.description = (
        "Chooses every setting for a thousand to some million pairs and gives the reasons; trains both towers, keeps the best "
        "epoch on held-out pairs, and interpolates with the weights before (WiSE-FT). The same call continues after a stop."
    )
    parser.epilog = "Training flags (zerovl train --help) replace the chosen ones: --set lr=5e-6, or all of them after --."
    parser.add_argument(
        "--from",
        dest="start",
        required=True,
        metavar="MODEL",
        help="an exported folder, a training checkpoint, or open_clip's NAME/TAG, such as ViT-B-32/laion2b_s34b_b79k",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR|NAME=SHARDS::...",
        help="pairs: a folder of `zerovl data pack`, of shards or with a table, or named sources as --train-data takes them",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE",
        help="set or replace a training flag, or effective-batch; FLAG alone sets a switch, FLAG= removes a flag",
    )  # fmt: skip
    add_settings(parser, FinetuneFlags)
    add_settings(parser.add_argument_group("as for train"), TuningFlags)
    add_settings(parser.add_argument_group("weights in between"), CurveFlags)
    add_encoder(parser)
    parser.add_argument("training", nargs="*", metavar="-- FLAGS", help="training flags")

    def run(arguments: argparse.Namespace) -> Any:
        from open_clip_zerovl.finetune.finetuning import run_finetune
        from open_clip_zerovl.finetune.request import FinetuneRequest
        from open_clip_zerovl.recipe.arguments import parse_settings, settings_of

        tuned = {
            each.option.removeprefix("--"): (each.default, getattr(arguments, each.name))
            for each in flags_of(TuningFlags)
        }
        request = settings_from(
            FinetuneRequest,
            arguments,
            start=encoder_of(arguments, arguments.start),
            data=arguments.data,
            out=arguments.out.expanduser().absolute(),
            given={
                **{
                    flag: str(value) for flag, (default, value) in tuned.items() if value != default
                },
                **parse_settings(arguments.set),
                **settings_of(arguments.training),
            },
        )
        return run_finetune(
            request, say=lambda line: print(f"finetune: {line}", file=sys.stderr, flush=True)
        )

    return run


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fp16", action="store_true", help="store the weights in half precision, half the size"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier export that is there"
    )


def _show_progress() -> None:
    """Print a line on stderr at once, since imports take seconds, and from then on the progress lines of `checkpoints`."""
    logger = logging.getLogger("open_clip_zerovl.checkpoints")
    logger.setLevel(logging.INFO)
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("zerovl: %(message)s"))
    logger.handlers = [lines]
    logger.propagate = False  # a handler of the root, which open_clip's first warning adds, would repeat these lines
    logger.info("loading open_clip")
    load_open_clip()


def _print_loading(done: str, folder: Path, notes: list[str]) -> None:
    print(
        f"{done}. Load it with open_clip.create_model_and_transforms('local-dir:{folder}').",
        *notes,
        sep="\n",
    )


def export(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl export`."""
    parser.description = (
        "Write a training checkpoint as a local-dir: folder for open_clip.create_model_and_transforms, or as a folder for "
        "transformers' AutoModel and AutoProcessor."
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="logs/NAME/checkpoints/epoch_N.pt; for transformers also an exported folder or open_clip's NAME/pretrained",
    )
    parser.add_argument("out", type=Path, nargs="?", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--here",
        action="store_true",
        help="CHECKPOINT is an exported folder that was moved: write its new path into it, for stock open_clip, and end",
    )
    parser.add_argument(
        "--format",
        choices=("open_clip", "transformers"),
        default="open_clip",
        help="default %(default)s",
    )
    parser.add_argument(
        "--model", help="the model's name, if no params.txt beside the checkpoint names it"
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE.json",
        help="one's own model, if params.txt does not find it",
    )
    parser.add_argument(
        "--text-model",
        metavar="DIR",
        help="folder of the HF text tower, if params.txt does not name it",
    )
    parser.add_argument(
        "--license",
        metavar="NAME",
        help="licence in the model card: mit, apache-2.0, cc-by-4.0, ...",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="then push the folder to NAMESPACE/NAME on the Hugging Face hub, in one commit",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="make the repository a private one, if it is not there",
    )
    _add_writing(parser)
    return _run_export


def _run_export(arguments: argparse.Namespace) -> None:
    if arguments.here:
        from open_clip_zerovl.checkpoints.export import absolute
        from open_clip_zerovl.models.local_dir import write_paths_here

        folder = absolute(arguments.checkpoint)
        changed = write_paths_here(folder)
        _print_loading(
            "Its new path is written" if changed else "Nothing had to be changed", folder, []
        )
        return
    if arguments.out is None:
        raise UserError("a folder to write is missing: zerovl export CHECKPOINT DIR")
    hub = arguments.push_to_hub
    if arguments.private and not hub:
        raise UserError("--private needs --push-to-hub, which makes the repository")
    _show_progress()
    if hub:
        from open_clip_zerovl.checkpoints.hub import check_hub

        check_hub(hub)
    common = {
        "model": own_model(arguments.model_config) or arguments.model,
        "text_model": arguments.text_model,
        "precision": "fp16" if arguments.fp16 else None,
        "licence": arguments.license,
        "force": arguments.force,
    }
    if arguments.format == "transformers":
        from open_clip_zerovl.checkpoints.transformers_folder import export_transformers

        folder = export_transformers(arguments.checkpoint, arguments.out, **common)
        print(
            f"Exported. Load it with transformers.AutoModel.from_pretrained('{folder}') and AutoProcessor."
        )
    else:
        from open_clip_zerovl.checkpoints.export import export_local_dir, loading_notes

        folder = export_local_dir(arguments.checkpoint, arguments.out, **common)
        _print_loading("Exported", folder.resolve(), loading_notes(folder, moved=not hub))
    if hub:
        from open_clip_zerovl.checkpoints.hub import push_folder

        logging.getLogger(push_folder.__module__).info("pushing %s to %s", folder, hub)
        address = push_folder(folder, hub, private=arguments.private)
        print(f"Pushed: {address}")


def align(parser: argparse.ArgumentParser) -> RunCommand:
    """`zerovl align`."""
    parser.description = (
        "Encodes pairs once by frozen encoders and trains heads on the stored features: a retrieval model in the time of some "
        "epochs of matrix products. The same call continues after a stop."
    )
    image = "timm:NAME or a folder of timm's, an exported folder, a checkpoint, NAME/TAG; several are compared"
    text = "hf:NAME or a folder (transformers, sentence-transformers), an exported folder, a checkpoint, NAME/TAG; several"
    parser.add_argument("--image", action="append", required=True, metavar="ENCODER", help=image)
    parser.add_argument("--text", action="append", required=True, metavar="ENCODER", help=text)
    parser.add_argument(
        "--data", required=True, metavar="DIR|NAME=SHARDS::...", help="pairs, as for finetune"
    )
    parser.add_argument(
        "--retrieval-data",
        metavar=SETS,
        help="held-out pairs in CLIP_benchmark's layout (default: as for finetune)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    add_settings(parser, AlignFlags)

    def run(arguments: argparse.Namespace) -> Any:
        from open_clip_zerovl.align.alignment import run_align
        from open_clip_zerovl.align.request import AlignRequest
        from open_clip_zerovl.finetune.data import find_data

        data = find_data(arguments.data)
        held_out = (
            arguments.retrieval_data if arguments.retrieval_data is not None else data.held_out
        )
        return run_align(
            settings_from(
                AlignRequest,
                arguments,
                images=tuple(dict.fromkeys(arguments.image)),
                texts=tuple(dict.fromkeys(arguments.text)),
                train_data=data.train_data,
                held_out=held_out,
                out=arguments.out.expanduser().absolute(),
            )
        )

    return run
