"""Can the gain of debiased sampling be read off the data before a training? A source probe on raw pictures and captions.

    python -m scripts.ablation.raw_probe [--data data] [--out docs/results/raw-probe.json]

Figure 3's probe guesses the source from a picture's thumbnail or from the words of a caption, without any model. The page sets
its accuracy beside the gain that a training with debiased batches brought in the same mixture.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.compare.measures import source_probe_accuracy
from open_clip_zerovl.shards.members import Sample
from scripts.ablation.jobs import Ablation, Job
from scripts.ablation.protocol import FIXED, MINIATURES
from scripts.ablation.run import prepare
from scripts.ablation.sources import pairs_of

#: The compared conditions of each mixture (with debiased and with random batches), which pairs its gain is read from.
MIXTURES = {
    "three styles of the same things": ("debiased", "random"),
    "styles that share no concepts": ("apart-debiased", "apart-random"),
    "one style, other contents": ("alike-debiased", "alike-random"),
    "one source 18 times larger": ("large-debiased", "large-random"),
    "two kinds of pictures in one source": ("contexts-debiased", "contexts-random"),
}
PAIRS = 500  # of each source at most
THUMBNAIL, WORDS = 8, 256
BATCH = 64


def raw_features(pairs: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Thumbnails (N, 192) in RGB, and (N, V + 1) the most frequent words of each caption beside its number of words."""
    from sklearn.feature_extraction.text import CountVectorizer

    def thumbnail(pair: Sample) -> np.ndarray:
        picture = Image.open(io.BytesIO(pair.files["png"])).convert("RGB")
        return np.asarray(
            picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX), dtype=np.float64
        ).ravel()

    captions = [pair.files["txt"].decode() for pair in pairs]
    words = CountVectorizer(binary=True, max_features=WORDS).fit_transform(captions).toarray()
    lengths = np.array([[len(caption.split())] for caption in captions])
    return np.stack([thumbnail(pair) for pair in pairs]), np.hstack([words, lengths])


def probe_mixture(sources: Mapping[str, Sequence[Sample]], seed: int) -> dict[str, float]:
    """The probe's accuracies, chance, the share of a random batch's negatives that are of another source, and batches.

    Args:
        sources: name -> all its training pairs.
        seed: of the drawn pairs and of the folds.
    """
    sizes = np.array([len(pairs) for pairs in sources.values()])
    rng = np.random.default_rng(seed)
    least = min(
        PAIRS, int(sizes.min())
    )  # equal numbers, so that chance is the same for each source
    drawn = {
        name: [pairs[i] for i in rng.permutation(len(pairs))[:least]]
        for name, pairs in sources.items()
    }
    pairs = [pair for of in drawn.values() for pair in of]
    names = [name for name, of in drawn.items() for _ in of]
    concepts = [json.loads(pair.files["json"])["concept"] for pair in pairs]
    pictures, captions = raw_features(pairs)
    return {
        "pictures": source_probe_accuracy(pictures, names, concepts=concepts, seed=seed),
        "captions": source_probe_accuracy(captions, names, concepts=concepts, seed=seed),
        "chance": 1 / len(sources),
        "other_source": float(1 - ((sizes / sizes.sum()) ** 2).sum()),
        "batches": float(sizes.min() / BATCH),
    }


def probe_seeds(data: Path, run: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The mean of `probe_mixture` over the mixtures of these seeds, each of which leaves another source out."""
    found = []
    with tempfile.TemporaryDirectory() as out:
        ablation = Ablation({name: data / name for name in MINIATURES}, Path(out), FIXED)
        for seed in seeds:
            job = Job(seed, run)
            prepare(ablation, job)
            folders = ablation.sources(job)
            if job.condition.kind == "plain":
                folders = {name: data / job.condition.miniature / name for name in job.trained}
            found.append(
                probe_mixture(
                    {name: pairs_of(path.parent, name) for name, path in folders.items()}, seed
                )
            )
    return {key: sum(one[key] for one in found) / len(found) for key in found[0]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the miniatures")
    parser.add_argument("--out", type=Path, default=Path("docs/results/raw-probe.json"))
    arguments = parser.parse_args(argv)
    try:
        table = [
            {
                "mixture": name,
                "run": run,
                "against": against,
                **probe_seeds(arguments.data, run, range(4)),
            }
            for name, (run, against) in MIXTURES.items()
        ]
    except UserError as error:
        print(f"raw_probe: error: {error}", file=sys.stderr)
        return 2
    write_atomically(arguments.out, json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
