"""The paper's released weights, converted, verified and scored beside the paper's zero-shot numbers (Tables 1 and 9).

    make paper-weights CHECKPOINT="14m=zerovl_14m.pth::100m=zerovl_100m.pth" COCO=dataset_coco.json@/data/coco F30K=/data/f30k

The one check of the whole chain (conversion, towers, tokenizer, transform, recalls) against published numbers that needs no
training. A checkpoint is named by the data it was trained on, because the two were trained with other image normalisation and
have other numbers. Pictures pass the paper's transform (2.2, A.9: squash to 256, centre crop 224), the first five captions of
each image count, towers run in float32 as the released evaluation does.

Exit status: 0 if all numbers agree within the margins, 1 if some differ or cannot be compared, 2 after an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError, ended
from open_clip_zerovl.core.files import check_writable, write_atomically
from scripts.tables import markdown_table

# Tables 1 and 9, zero-shot: recall@1 and @10 from image to text and from text to image, RSUM; in percent points.
MEASURED = (
    "image_to_text_R@1",
    "image_to_text_R@10",
    "text_to_image_R@1",
    "text_to_image_R@10",
    "rsum",
)
PAPER = {
    "14m": {"coco": (59.3, 89.6, 44.1, 79.5, 425.0), "f30k": (85.5, 98.5, 69.8, 94.5, 536.2)},
    "100m": {"coco": (64.0, 91.4, 47.3, 81.1, 442.1), "f30k": (88.0, 99.2, 73.5, 95.7, 546.5)},
}
NORMALIZATION = {"14m": "imagenet", "100m": "half"}  # of the released evaluation's configurations
SIZES = {"coco": (5000, 25_000), "f30k": (1000, 5000)}  # images and captions (Table 2)
IMAGE_MODEL = "vit_base_patch16_224.augreg_in21k"
TEXT_MODEL = "bert-base-uncased"

# The margins are a choice: other builds of the JPEG decoder, of the resize and of a matrix product move single pairs across a
# rank. One of Flickr30K's 1,000 images is 0.1 of a recall from image to text.
RECALL_MARGIN = 0.5
RSUM_MARGIN = 1.0


@dataclass(frozen=True)
class Comparison:
    """One checkpoint on one set.

    Attributes:
        weights, set_name: keys of PAPER.
        ours: recalls and RSUM in percent points by the names of MEASURED, and the numbers of `images` and `captions`.
    """

    weights: str
    set_name: str
    ours: Mapping[str, float]

    @property
    def paper(self) -> dict[str, float]:
        """Return the paper's numbers, by the names of MEASURED."""
        return dict(zip(MEASURED, PAPER[self.weights][self.set_name], strict=True))

    def verdict(self) -> str:
        """Say whether the numbers agree, both rounded to a tenth as the paper prints them."""
        images, captions = SIZES[self.set_name]
        if (self.ours["images"], self.ours["captions"]) != (images, captions):
            return (
                f"cannot be compared: {self.ours['images']:,.0f} images and {self.ours['captions']:,.0f} captions; the paper's "
                f"test set has {images:,} and {captions:,}"
            )
        apart = [
            SHORT[name]
            for name, paper in self.paper.items()
            if round(abs(round(self.ours[name], 1) - paper), 1)
            > (RSUM_MARGIN if name == "rsum" else RECALL_MARGIN)
        ]
        if apart:
            return f"DIFFERS in {', '.join(apart)} (margins: RSUM {RSUM_MARGIN:g}, recalls {RECALL_MARGIN:g})"
        return f"{AGREES}: RSUM within {RSUM_MARGIN:g}, each recall within {RECALL_MARGIN:g}"


SHORT = dict(zip(MEASURED, ("I2T R@1", "I2T R@10", "T2I R@1", "T2I R@10", "RSUM"), strict=True))
AGREES = "agrees"


def table_of(comparisons: Sequence[Comparison]) -> str:
    """Write ours, the paper's and the difference for each checkpoint and set, with the verdicts."""
    rows = []
    for each in comparisons:
        numbers = {
            "ours": [f"{each.ours[name]:.1f}" for name in MEASURED],
            "paper": [f"{each.paper[name]:.1f}" for name in MEASURED],
            "difference": [
                f"{round(each.ours[name], 1) - each.paper[name]:+.1f}" for name in MEASURED
            ],
        }
        rows += [[each.weights, each.set_name, label, *cells] for label, cells in numbers.items()]
    verdicts = [f"{each.weights} on {each.set_name}: {each.verdict()}." for each in comparisons]
    header = ["weights", "set", "numbers", *SHORT.values()]
    return "\n".join([markdown_table(header, rows), "", *verdicts])


def parse_checkpoints(spec: str) -> dict[str, Path]:
    """Read `"14m=FILE::100m=FILE"` as a table.

    Raises:
        UserError: an entry without one of these names, or a name given twice.
    """
    found: dict[str, Path] = {}
    for entry in spec.split("::"):
        name, equals, path = entry.strip().partition("=")
        if not equals or name not in PAPER or not path:
            raise UserError(
                f"'{entry}' does not say which weights it is: write {' or '.join(f'{known}=FILE' for known in PAPER)}, which "
                "decides the image normalisation and the paper's numbers"
            )
        if name in found:
            raise UserError(f"{name} is given twice ({found[name]} and {path}); give one")
        found[name] = Path(path).expanduser()
    return found


def compare(
    options: argparse.Namespace, checkpoints: Mapping[str, Path], sets: Mapping[str, str]
) -> list[Comparison]:
    """Convert, verify and score each checkpoint.

    Raises:
        UserError: a set, a checkpoint or a text model that cannot be read; embeddings that do not verify.
    """
    from open_clip_zerovl.checkpoints.encoder import Encoder
    from open_clip_zerovl.data.sets import open_retrieval_set
    from open_clip_zerovl.evaluate.retrieval import RetrievalSettings, run_retrieval
    from scripts.paper.convert import convert_checkpoint

    for location in sets.values():
        open_retrieval_set(location)  # before a conversion that would be in vain
    data = "::".join(f"{name}={location}" for name, location in sets.items())
    comparisons = []
    for name, file in checkpoints.items():
        folder = convert_checkpoint(
            file,
            options.out / f"zerovl-{name}",
            image_model=options.image_model,
            text_model=options.text_model,
            normalization=NORMALIZATION[name],
            verify=True,
            force=True,
        )
        print(f"{name}: converted and verified: {folder}", flush=True)
        encoder = Encoder(
            str(folder),
            device=options.device,
            workers=options.workers,
            batch_size=options.batch_size,
        )
        settings = RetrievalSettings(captions_per_image=5, paper_transform=True)
        with contextlib.redirect_stdout(io.StringIO()):  # run_retrieval prints a table of its own
            results = run_retrieval(encoder, data, settings)
        for set_name, row in results.items():
            counts = ("images", "captions", "rsum")
            ours = {key: value if key in counts else 100 * value for key, value in row.items()}
            comparisons.append(Comparison(name, set_name, ours))
    return comparisons


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoints", metavar="14m=FILE::100m=FILE", help="the released weights, one or both"
    )
    parser.add_argument(
        "--coco",
        metavar="SET",
        help="COCO's Karpathy test split, in any layout of zerovl retrieval",
    )
    parser.add_argument("--f30k", metavar="SET", help="Flickr30K's Karpathy test split, likewise")
    parser.add_argument(
        "--text-model",
        default=TEXT_MODEL,
        metavar="NAME|DIR",
        help="BERT's config and tokenizer (default %(default)s)",
    )
    parser.add_argument(
        "--image-model",
        default=IMAGE_MODEL,
        metavar="NAME",
        help="timm's name (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/paper-weights"), help="default %(default)s"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ... (default: cuda if available)"
    )
    parser.add_argument(
        "--workers", type=int, default=4, help="loader processes (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images at once (default %(default)s)"
    )
    options = parser.parse_args(argv)
    return ended(lambda: run(options), "weights.py")


def run(options: argparse.Namespace) -> int:
    """Compare, print and write, and return 0 if all numbers agree, else 1."""
    sets = {name: value for name in SIZES if (value := getattr(options, name))}
    checkpoints = parse_checkpoints(options.checkpoints)
    if not sets:
        raise UserError("no test set is given: COCO=SET, F30K=SET or both (--coco, --f30k)")
    check_writable(options.out, folder=True)
    comparisons = compare(options, checkpoints, sets)
    text = (
        f"{table_of(comparisons)}\n\nZero-shot recalls in percent and their sum. Transform: squash 256, crop 224 (A.9). The "
        "first five captions of each image. float32.\n"
    )
    write_atomically(options.out / "paper-weights.md", text)
    print(f"\n{text}Written: {options.out}/paper-weights.md")
    return 0 if all(each.verdict().startswith(AGREES) for each in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
