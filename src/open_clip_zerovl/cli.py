"""`zerovl <command>`: the one place in the library that reads a command line.

Each command is a thin wrapper around a library function, imported when it is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, or 2 after one sentence on standard error."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"zerovl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerovl: interrupted; call it again to go on", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="zerovl",
        description="Data, evaluation and export around open_clip training with the ZeroVL recipe "
        "(training itself: python -m training.main --help).",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_data(commands)
    _add_retrieval(commands)
    _add_export(commands)
    return parser


def _add_data(commands) -> None:
    data = commands.add_parser("data", help="prepare a dataset as webdataset shards", description="Prepare a dataset.")
    datasets = data.add_subparsers(title="datasets", metavar="DATASET", required=True)
    emoji = datasets.add_parser(
        "emoji",
        help="four emoji sets as four sources (the demo's data)",
        description="Fetch Noto, Twemoji, OpenMoji and Fluent emoji with their metadata, rasterise them and write "
        "webdataset shards a source, held-out retrieval sets and a small BERT folder. A second call does nothing.",
    )
    emoji.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    emoji.add_argument("--px", type=int, default=64, help="side of the pictures in pixels (default %(default)s)")
    emoji.add_argument("--seed", type=int, default=0, help="seed of the split (default %(default)s)")
    emoji.add_argument("--force", action="store_true", help="write again what is there already")
    emoji.set_defaults(run=_run_emoji)


def _run_emoji(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.datasets.emoji import prepare_emoji

    prepare_emoji(arguments.out, px=arguments.px, seed=arguments.seed, force=arguments.force)


def _add_retrieval(commands) -> None:
    retrieval = commands.add_parser(
        "retrieval",
        help="recall@1/5/10 and RSUM of a model on retrieval sets",
        description="Zero-shot retrieval both ways, with the checkpoint's own transform, as CLIP_benchmark measures it.",
    )
    retrieval.add_argument(
        "model",
        metavar="MODEL",
        help="an exported folder, local-dir:/abs/folder, a training checkpoint (.pt), or open_clip's NAME/pretrained",
    )
    retrieval.add_argument(
        "--data", required=True, metavar="NAME=DIR::...", help="retrieval sets in CLIP_benchmark's webdataset layout"
    )
    retrieval.add_argument("--model-name", metavar="NAME", help="model of a checkpoint that lies away from its params.txt")
    retrieval.add_argument("--text-model", metavar="DIR", help="folder of the HF text tower of a training checkpoint")
    retrieval.add_argument("--split", default="test", help="split of the sets (default %(default)s)")
    retrieval.add_argument(
        "--captions",
        type=_captions,
        default=5,
        metavar="N|all",
        help="captions kept of each image (default %(default)s, as the papers count COCO; CLIP_benchmark: all)",
    )
    retrieval.add_argument("--batch-size", type=int, default=64, help="default %(default)s")
    retrieval.add_argument("--workers", type=int, default=0, help="loader processes (default %(default)s)")
    retrieval.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda where there is one)")
    retrieval.add_argument("--output", type=Path, metavar="FILE.json", help="also write the metrics as JSON")
    retrieval.set_defaults(run=_run_retrieval)


def _captions(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of captions nor 'all'")
    return int(text)


def _run_retrieval(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.retrieval import run_retrieval

    run_retrieval(
        arguments.model,
        arguments.data,
        model_name=arguments.model_name,
        text_model=arguments.text_model,
        split=arguments.split,
        captions_per_image=arguments.captions,
        batch_size=arguments.batch_size,
        num_workers=arguments.workers,
        device=arguments.device,
        output=arguments.output,
    )


def _add_export(commands) -> None:
    export = commands.add_parser(
        "export",
        help="a training checkpoint as a folder that stock open_clip loads",
        description="Write a training checkpoint as a local-dir: folder for open_clip.create_model_and_transforms.",
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="logs/NAME/checkpoints/epoch_N.pt")
    export.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    export.add_argument("--model", help="the model's name, where no params.txt beside the checkpoint tells it")
    export.add_argument("--text-model", metavar="DIR", help="folder of the HF text tower, likewise")
    export.add_argument("--force", action="store_true", help="replace a folder that is there")
    export.set_defaults(run=_run_export)


def _run_export(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.checkpoints import export_local_dir, relocation_note

    folder = export_local_dir(
        arguments.checkpoint,
        arguments.out,
        model=arguments.model,
        text_model=arguments.text_model,
        force=arguments.force,
    )
    print(f"Exported. Load it with open_clip.create_model_and_transforms('local-dir:{folder.resolve()}').")
    note = relocation_note(folder)
    if note:
        print(note)


if __name__ == "__main__":
    sys.exit(main())
