"""The part of `zerovl`'s command line that writes a model as a folder, and to a hub: `zerovl export` (see program.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from open_clip_zerovl.cli.encoder import own_model
from open_clip_zerovl.core.errors import UserError


def add_export(commands) -> None:
    """Add `zerovl export`."""
    export = commands.add_parser(
        "export",
        help="a training checkpoint as a folder that stock open_clip or transformers loads",
        description="Write a training checkpoint as a local-dir: folder for open_clip.create_model_and_transforms, or as a "
        "folder for transformers' AutoModel and AutoProcessor.",
    )
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="logs/NAME/checkpoints/epoch_N.pt; for transformers also an exported folder or open_clip's NAME/pretrained",
    )
    export.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    export.add_argument(
        "--format", choices=("open_clip", "transformers"), default="open_clip", help="default %(default)s"
    )
    export.add_argument("--model", help="the model's name, if no params.txt beside the checkpoint names it")
    export.add_argument("--model-config", metavar="FILE.json", help="one's own model, if params.txt does not find it")
    export.add_argument(
        "--text-model", metavar="DIR", help="folder of the HF text tower, if params.txt does not name it"
    )
    export.add_argument("--fp16", action="store_true", help="store the weights in half precision, half the size")
    export.add_argument("--license", metavar="NAME", help="for the model card: mit, apache-2.0, cc-by-4.0, ...")
    export.add_argument(
        "--push-to-hub",
        metavar="REPO",
        help="then push the folder to NAMESPACE/NAME on the Hugging Face hub, in one commit",
    )
    export.add_argument("--private", action="store_true", help="make the repository a private one, if it is not there")
    export.add_argument("--force", action="store_true", help="replace an earlier export that is there")
    export.set_defaults(run=_run_export)


def _run_export(arguments: argparse.Namespace) -> None:
    common = {
        "model": own_model(arguments.model_config) or arguments.model,
        "text_model": arguments.text_model,
        "precision": "fp16" if arguments.fp16 else None,
        "licence": arguments.license,
        "force": arguments.force,
    }
    if arguments.private and not arguments.push_to_hub:
        raise UserError("--private is of the repository that --push-to-hub makes: give both, or neither")
    if arguments.push_to_hub:
        from open_clip_zerovl.checkpoints.hub import check_hub

        check_hub(arguments.push_to_hub)
    if arguments.format == "transformers":
        from open_clip_zerovl.checkpoints.transformers_folder import export_transformers

        folder = export_transformers(arguments.checkpoint, arguments.out, **common)
        print(f"Exported. Load it with transformers.AutoModel.from_pretrained('{folder}') and AutoProcessor.")
    else:
        from open_clip_zerovl.checkpoints.export import export_local_dir, loading_notes

        folder = export_local_dir(arguments.checkpoint, arguments.out, **common)
        print(f"Exported. Load it with open_clip.create_model_and_transforms('local-dir:{folder.resolve()}').")
        for note in loading_notes(folder, moved=not arguments.push_to_hub):
            print(note)
    if arguments.push_to_hub:
        from open_clip_zerovl.checkpoints.hub import push_folder

        address = push_folder(folder, arguments.push_to_hub, private=arguments.private)
        print(f"Pushed and compared file by file: {address}")
