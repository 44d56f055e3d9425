"""Retrieval before and after a fine-tuning: the checkpoint it started from and its last one, on its test set.

    python -m scripts.paper.finetune_report logs/finetune-coco [--recipe finetune-coco] [--transform paper|checkpoint]

Prints one table and writes it into the run's folder as finetune.json and finetune.md. The run's params.txt names the checkpoint
it started from (`--init-from`) and its set (`--retrieval-data`). Images pass each checkpoint's own transform, as in the run's
log and in `zerovl retrieval`. With --recipe the table has the paper's row of Table 10, and images pass the paper's transform
(A.9: squash to 256, crop 224) to be comparable; the table says which was used. The first five captions of each image are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.checkpoints.spec import read_params
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.retrieval import parse_retrieval_data
from open_clip_zerovl.evaluate.interpolation.compare import in_percent, recall_table
from open_clip_zerovl.evaluate.retrieval.run import RetrievalSettings, run_retrieval
from scripts.paper.table import RECIPES, find_recipe
from training.checkpointing import newest_whole


@dataclass(frozen=True)
class Comparison:
    """Retrieval before and after a fine-tuning.

    Attributes:
        before, after: metrics by the names of compare.ROWS, in percent points, and numbers of `images` and `captions`.
        paper: those of these metrics that the paper reports.
        checkpoints: before and after.
        data: the retrieval set.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    paper: Mapping[str, float]
    checkpoints: tuple[str, str]
    data: str
    transform: str

    def table(self) -> str:
        """As Markdown, aligned for a terminal."""
        columns = {"before": self.before, "after": self.after, **({"paper": self.paper} if self.paper else {})}
        return recall_table(columns)

    def caption(self) -> str:
        """Set, transform and checkpoints, in Markdown."""
        before, after = self.checkpoints
        return (
            f"Recalls in percent and their sum, on {self.data}: {self.after['images']:,} images, "
            f"{self.after['captions']:,} captions, transform: {self.transform}.\nBefore: `{before}`. After: `{after}`."
        )


def compare(run: Path, *, recipe: str | None = None, paper_transform: bool = False, device: str = "auto") -> Comparison:
    """Score the checkpoint that a run started from and its last one.

    Raises:
        UserError: a run without checkpoint, without --init-from or without --retrieval-data; a model that cannot be loaded.
    """
    after = newest_whole(str(run / "checkpoints"))
    if after is None:
        raise UserError(f"{run} holds no whole checkpoint; give the folder of a run, such as logs/finetune-coco")
    params = read_params(Path(after))
    for flag in ("init_from", "retrieval_data"):
        if not params.get(flag):
            raise UserError(f"{run} was trained without --{flag.replace('_', '-')}, so there is nothing to compare")
    sets = parse_retrieval_data(str(params["retrieval_data"]))
    wanted = RECIPES[recipe].finetuned_on if recipe else next(iter(sets))
    if wanted not in sets:
        raise UserError(f"{run} was trained with the sets {', '.join(sets)}, but the recipe is scored on {wanted}")
    before = Path(str(params["init_from"]))
    if before.suffix == ".safetensors":
        before = before.parent  # the weights of an exported folder, whose config is beside them
    scores = []
    settings = RetrievalSettings(paper_transform=paper_transform)
    for model in (str(before), after):
        with contextlib.redirect_stdout(io.StringIO()):  # run_retrieval prints a table of one checkpoint
            result = run_retrieval(Encoder(model, device=device), f"{wanted}={sets[wanted]}", settings)[wanted]
        scores.append(in_percent(result))
    return Comparison(
        scores[0],
        scores[1],
        RECIPES[recipe].paper_row if recipe else {},
        (str(before), after),
        str(sets[wanted]),
        "squash 256, crop 224, scaled to the model's size (A.9)" if paper_transform else "the checkpoint's own",
    )


def write(run: Path, comparison: Comparison) -> list[Path]:
    """finetune.json and finetune.md in the run's folder."""
    content = {
        "data": comparison.data,
        "transform": comparison.transform,
        "before": {"checkpoint": comparison.checkpoints[0], **comparison.before},
        "after": {"checkpoint": comparison.checkpoints[1], **comparison.after},
        "paper": dict(comparison.paper),
    }
    files = [run / "finetune.json", run / "finetune.md"]
    write_atomically(files[0], json.dumps(content, indent=2) + "\n")
    write_atomically(files[1], f"{comparison.table()}\n\n{comparison.caption()}\n")
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--recipe", choices=[name for name in RECIPES if RECIPES[name].finetuned_on])
    parser.add_argument(
        "--transform", choices=("paper", "checkpoint"), help="default: paper with --recipe, else the checkpoint's own"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: cuda where there is one)")
    options = parser.parse_args()
    recipe = find_recipe(options.recipe) if options.recipe else None
    transform = options.transform or ("paper" if recipe else "checkpoint")
    try:
        comparison = compare(options.run, recipe=recipe, paper_transform=transform == "paper", device=options.device)
        files = write(options.run, comparison)
    except UserError as error:
        print(f"finetune_report: error: {error}", file=sys.stderr)
        return 2
    print(f"\n{comparison.table()}\n\n{comparison.caption()}\nWritten: {' '.join(map(str, files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
