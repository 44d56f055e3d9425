"""`zerovl <command>`. In the library only this room reads a command line (data.py, plan.py, teacher.py, export.py, doctor.py).

Each command calls one library function, which is imported when the command runs, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl import __version__
from open_clip_zerovl.cli.compare import add_compare
from open_clip_zerovl.cli.data import add_cluster, add_data
from open_clip_zerovl.cli.doctor import add_doctor
from open_clip_zerovl.cli.encoder import add_encoder_flags, add_models_flags, encoder_of
from open_clip_zerovl.cli.export import add_export
from open_clip_zerovl.cli.finetune import add_finetune
from open_clip_zerovl.cli.interpolate import add_interpolate
from open_clip_zerovl.cli.parser import Parser
from open_clip_zerovl.cli.plan import add_plan
from open_clip_zerovl.cli.report import add_report
from open_clip_zerovl.cli.search import add_search
from open_clip_zerovl.cli.teacher import add_teacher
from open_clip_zerovl.cli.train import add_train
from open_clip_zerovl.cli.values import captions, positive, seed
from open_clip_zerovl.core.errors import sentence_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, or 2 after one sentence on standard error (`plan` and `doctor` also have 1).

    Errors that the user can correct end in that sentence (see `errors.sentence_of`); others are defects and are raised.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("zerovl: interrupted; call it again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `zerovl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        print(f"zerovl: error: {sentence}", file=sys.stderr)
        return 2
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="zerovl",
        description="open_clip training with the ZeroVL recipe, and data, evaluation and export around it.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"open_clip_zerovl {__version__}",
        help="say which release this is, and end",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands)
    add_report(commands)
    add_plan(commands)
    add_doctor(commands)
    add_data(commands)
    add_cluster(commands)
    add_teacher(commands)
    _add_retrieval(commands)
    _add_linear_probe(commands)
    _add_bias(commands)
    add_compare(commands)
    add_search(commands)
    add_export(commands)
    add_finetune(commands)
    add_interpolate(commands)
    _add_convert(commands)
    return parser


def _add_retrieval(commands) -> None:
    retrieval = commands.add_parser(
        "retrieval",
        help="recall@1/5/10 and RSUM of a model on retrieval sets",
        description="Zero-shot retrieval both ways, with the checkpoint's own transform, as CLIP_benchmark measures it. "
        "On several GPUs: torchrun --nproc-per-node=N -m open_clip_zerovl.cli retrieval ...",
    )
    retrieval.add_argument(
        "model",
        metavar="MODEL",
        help="an exported folder, local-dir:/abs/folder, a training checkpoint (.pt), or open_clip's NAME/pretrained",
    )
    retrieval.add_argument(
        "--data",
        required=True,
        metavar="NAME=SET::...",
        help="a set is a folder in CLIP_benchmark's webdataset layout, shards as training reads them, a table of pairs "
        "(pairs.csv, or valid_anno.csv@PICTURES) or dataset_coco.json@PICTURES (Karpathy)",
    )
    add_encoder_flags(retrieval)
    retrieval.add_argument("--split", default="test", help="split of the sets (default %(default)s)")
    retrieval.add_argument(
        "--captions",
        type=captions,
        default=5,
        metavar="N|all",
        help="captions kept of each image (default %(default)s, as the papers count COCO; CLIP_benchmark: all)",
    )
    retrieval.add_argument(
        "--paper-transform",
        action="store_true",
        help="squash to 256 and crop 224 as in the paper (A.9) instead of the checkpoint's own transform",
    )
    retrieval.add_argument(
        "--batch-size", type=positive, default=64, help="images at once on each rank (default %(default)s)"
    )
    retrieval.add_argument("--output", type=Path, metavar="FILE.json", help="also write the metrics as JSON")
    retrieval.add_argument("--csv", type=Path, metavar="FILE.csv", help="also write the metrics as CSV, one line a set")
    retrieval.add_argument(
        "--gallery", type=Path, metavar="FILE.html", help="also show hits and misses as one HTML page"
    )
    retrieval.set_defaults(run=_run_retrieval)


def _run_retrieval(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.evaluate.retrieval.score import RetrievalFiles, RetrievalSettings, run_retrieval

    encoder = encoder_of(arguments, arguments.model)
    settings = RetrievalSettings(arguments.split, arguments.captions, arguments.paper_transform)
    files = RetrievalFiles(arguments.output, arguments.csv, arguments.gallery)
    run_retrieval(encoder, arguments.data, settings, files)


def _add_linear_probe(commands) -> None:
    probe = commands.add_parser(
        "linear-probe",
        help="accuracy of a linear classifier on the frozen image tower",
        description="Linear probe (paper 5.3) on the image tower's features before the projection. An interrupted call "
        "goes on when it is made again with the same --out.",
    )
    probe.add_argument(
        "model",
        metavar="MODEL",
        help="an exported folder, local-dir:/abs/folder, a training checkpoint (.pt), or open_clip's NAME/pretrained",
    )
    add_encoder_flags(probe)
    where = (
        "a folder of class folders, webdataset shards (DIR or DIR/{000..099}.tar), or NAME:DIR of cub, food101, pets, "
    )
    where += "aircraft, places365, inat2021, inat17"
    probe.add_argument("--train", required=True, metavar="DATA", help=where)
    probe.add_argument("--test", required=True, metavar="DATA", help="likewise; NAME:DIR takes the test split")
    probe.add_argument("--out", required=True, type=Path, metavar="DIR", help="results, cached features, state")
    probe.add_argument(
        "--way",
        choices=("paper", "quick"),
        default="paper",
        help="paper: LARS on augmented images; quick: logistic regression on cached features (default %(default)s)",
    )
    probe.add_argument(
        "--label", default="cls", metavar="cls|json:FIELD", help="member that holds the class (default %(default)s)"
    )
    probe.add_argument("--epochs", type=positive, default=90, help="with --way paper (default %(default)s)")
    probe.add_argument(
        "--batch-size", type=positive, default=16384, help="effective batch with --way paper (default %(default)s)"
    )
    probe.add_argument("--lr", type=float, default=6.4, help="learning rate with --way paper (default %(default)s)")
    probe.add_argument("--wd", type=float, default=0.0, help="weight decay with --way paper (default %(default)s)")
    probe.add_argument(
        "--batch-norm",
        action="store_true",
        help="with --way paper: standardise the features and leave the bias out of LARS, as other papers' probes do",
    )
    probe.add_argument(
        "--micro-batch", type=positive, default=256, help="images in the tower at once (default %(default)s)"
    )
    probe.add_argument("--amp", action="store_true", help="run the tower in bf16")
    probe.add_argument("--seed", type=seed, default=0, help="default %(default)s")
    probe.set_defaults(run=_run_linear_probe)


def _run_linear_probe(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.evaluate.probe.lars import LarsSettings
    from open_clip_zerovl.evaluate.probe.run import run_linear_probe

    encoder = encoder_of(arguments, arguments.model, arguments.micro_batch)
    settings = LarsSettings(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
        weight_decay=arguments.wd,
        batch_norm=arguments.batch_norm,
        seed=arguments.seed,
    )
    run_linear_probe(
        encoder,
        arguments.train,
        arguments.test,
        out=arguments.out,
        way=arguments.way,
        settings=settings,
        label=arguments.label,
        amp=arguments.amp,
    )


def _add_bias(commands) -> None:
    bias = commands.add_parser(
        "bias",
        help="what models learned of their sources, side by side",
        description="log p of negatives by source, source probe, embedding map and caption lengths (paper 3.1, A.5), as "
        "JSON and as one self-contained HTML page.",
    )
    bias.add_argument(
        "models", nargs="+", metavar="[NAME=]MODEL", help="exported folders, training checkpoints, NAME/pretrained"
    )
    bias.add_argument(
        "--data",
        required=True,
        metavar="NAME=SHARDS::...",
        help="named sources as --train-data takes them, or retrieval sets; held out",
    )
    bias.add_argument("--out", type=Path, default=Path("bias"), metavar="DIR", help="default %(default)s")
    bias.add_argument(
        "--samples", type=positive, default=500, metavar="N", help="pairs of each source (default %(default)s)"
    )
    bias.add_argument(
        "--batch-sizes", type=positive, nargs="+", metavar="B", help="batches for log p (default: 16, 64, 256, ...)"
    )
    bias.add_argument(
        "--map-samples", type=positive, default=300, metavar="N", help="points of each source (default %(default)s)"
    )
    bias.add_argument(
        "--concept", metavar="FIELD", help="json field that says what a sample shows; its samples share a fold"
    )
    bias.add_argument("--batch-size", type=positive, default=64, help="samples encoded at once (default %(default)s)")
    bias.add_argument("--seed", type=seed, default=0, help="default %(default)s")
    add_models_flags(bias)
    bias.set_defaults(run=_run_bias)


def _run_bias(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.evaluate.bias.bias import BiasSettings, run_bias
    from open_clip_zerovl.evaluate.bias.encode import name_models

    encoders = {
        name: encoder_of(arguments, model, one_of_several=True) for name, model in name_models(arguments.models).items()
    }
    settings = BiasSettings(
        samples_per_source=arguments.samples,
        batch_sizes=arguments.batch_sizes,
        map_samples=arguments.map_samples,
        concept_field=arguments.concept,
        seed=arguments.seed,
    )
    run_bias(encoders, arguments.data, settings, out=arguments.out)


def _add_convert(commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="the paper's released checkpoint as a folder that stock open_clip loads",
        description="Write a checkpoint of the paper's released code, or of open_clip's training, as a local-dir: folder "
        "for open_clip.create_model_and_transforms.",
    )
    convert.add_argument("checkpoint", type=Path, metavar="CKPT", help="the released .pth, or an epoch_N.pt")
    convert.add_argument("out", type=Path, metavar="DIR", help="folder to write")
    convert.add_argument(
        "--image-model", metavar="NAME", help="timm's name of the ViT: vit_base_patch16_224.augreg_in21k"
    )
    convert.add_argument("--text-model", metavar="NAME_OR_DIR", help="the HF text tower: its config and tokenizer")
    convert.add_argument(
        "--image-size",
        type=positive,
        metavar="PX",
        help="side of the images (default: as trained; for another size the position embedding is interpolated)",
    )
    convert.add_argument(
        "--normalization",
        choices=("imagenet", "half"),
        default="imagenet",
        help="mean and deviation: imagenet for the released 14M weights, half (0.5) for 100M (default %(default)s)",
    )
    convert.add_argument(
        "--verify", action="store_true", help="compare embeddings with the checkpoint's own towers (1e-5)"
    )
    convert.add_argument("--force", action="store_true", help="replace an earlier export that is there")
    convert.set_defaults(run=_run_convert)


def _run_convert(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.checkpoints.convert import convert_checkpoint
    from open_clip_zerovl.checkpoints.export import loading_notes

    folder = convert_checkpoint(
        arguments.checkpoint,
        arguments.out,
        image_model=arguments.image_model,
        text_model=arguments.text_model,
        image_size=arguments.image_size,
        normalization=arguments.normalization,
        verify=arguments.verify,
        force=arguments.force,
    )
    verified = ", verified" if arguments.verify else ""
    print(f"Converted{verified}. Load it with open_clip.create_model_and_transforms('local-dir:{folder}').")
    for note in loading_notes(folder):
        print(note)
