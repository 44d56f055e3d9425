"""The part of `zerovl`'s command line that embeds training data by frozen teachers: `zerovl teacher` (see program.py).

How pictures are augmented is said by training's own flags.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from open_clip_zerovl.cli.values import natural, part, positive, seed
from open_clip_zerovl.core.flags import key_value
from open_clip_zerovl.data.names import AUTO_AUGMENTS, PIXEL_PATH, PIXEL_PATHS, POLICIES


def add_teacher(commands) -> None:
    """Add `zerovl teacher`."""
    teacher = commands.add_parser(
        "teacher",
        help="embed the training data once by frozen teachers, for training with --teacher",
        description="Each picture under several augmentations (views) and each caption through one or several frozen models, "
        "kept on disk. Training with --teacher DIR shows the same views and distils from the embeddings. Give the augmentation "
        "and the image size of the training to come. A call that was stopped goes on when it is made again.",
    )
    teacher.add_argument("models", nargs="+", metavar="MODEL", help="teachers, each as for retrieval")
    teacher.add_argument(
        "--train-data", required=True, metavar="NAME=SHARDS::...", help="named sources, as in training"
    )
    teacher.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    teacher.add_argument(
        "--views", type=positive, default=4, metavar="V", help="augmentations of each picture (default %(default)s)"
    )
    teacher.add_argument(
        "--image-size",
        type=positive,
        default=224,
        metavar="PX",
        help="side of the student's pictures (default %(default)s)",
    )
    as_in_training = teacher.add_argument_group("As in training")
    as_in_training.add_argument(
        "--aug-cfg",
        nargs="*",
        type=key_value,
        default=[],
        metavar="KEY=VALUE",
        help="open_clip's, such as scale=(0.6,1.0)",
    )
    as_in_training.add_argument("--auto-augment", choices=AUTO_AUGMENTS, help="AutoAugment policy after the crop")
    as_in_training.add_argument(
        "--image-interpolation",
        choices=("bicubic", "bilinear", "random"),
        default="bicubic",
        help="default %(default)s",
    )
    as_in_training.add_argument("--pixel-path", choices=PIXEL_PATHS, default=PIXEL_PATH, help="default %(default)s")
    as_in_training.add_argument(
        "--captions",
        metavar="{one-per-epoch,all}|FIELD=SHARE,...|FIELD+FIELD",
        help="several captions of an image; all are embedded",
    )
    as_in_training.add_argument("--on-bad-sample", choices=POLICIES, default="replace", help="default %(default)s")
    teacher.add_argument("--seed", type=seed, default=0, help="of the augmentations (default %(default)s)")
    teacher.add_argument(
        "--dtype", choices=("float16", "bfloat16"), default="float16", help="of the embeddings (default %(default)s)"
    )
    teacher.add_argument("--amp", action="store_true", help="run the teachers in bf16")
    teacher.add_argument("--batch-size", type=positive, default=64, help="samples at once (default %(default)s)")
    teacher.add_argument("--workers", type=natural, default=0, help="loader processes (default %(default)s)")
    teacher.add_argument(
        "--part", type=part, default=(0, 1), metavar="I/N", help="do every N-th part: N calls share a folder"
    )
    teacher.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda where there is one)")
    teacher.set_defaults(run=_run_teacher)


def _run_teacher(arguments: argparse.Namespace) -> None:
    from open_clip_zerovl.checkpoints.loading import Encoder
    from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources

    encoders = [
        Encoder(model, device=arguments.device, batch_size=arguments.batch_size, workers=arguments.workers)
        for model in arguments.models
    ]
    settings = TeacherSettings(
        views=arguments.views,
        image_size=arguments.image_size,
        interpolation=arguments.image_interpolation,
        aug_cfg=dict(arguments.aug_cfg),
        auto_augment=arguments.auto_augment,
        pixel_path=arguments.pixel_path,
        captions=arguments.captions,
        on_bad_sample=arguments.on_bad_sample,
        seed=arguments.seed,
        dtype=arguments.dtype,
        amp=arguments.amp,
        part=arguments.part,
    )
    embed_sources(arguments.train_data, encoders, arguments.out, settings)
