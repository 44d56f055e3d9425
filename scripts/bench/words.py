"""Captions a second of the word augmentation on one core (section 2.2).

    python scripts/bench/words.py [--tokenizer FOLDER_OR_HUB_NAME] [--captions 100000]

Expected: more than 20,000 captions/s; a caption has 10.4 words, about as many as one of CC3M. Without `--tokenizer` a small
WordPiece vocabulary is made from the captions; the vocabulary's size does not change the rate.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time

from open_clip.tokenizer import HFTokenizer

from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.words import WordAugment
from scripts.drawn.vocabulary import write_bert

WORDS = (
    *("a", "the", "of", "on", "in", "with", "and", "two", "man", "woman", "dog", "cat", "street", "house", "table"),
    *("red", "blue", "green", "small", "large", "old", "young", "white", "black", "standing", "sitting", "wooden"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder or hub name of an HF tokenizer with a mask token")
    parser.add_argument("--captions", type=int, default=100_000, help="how many to augment")
    args = parser.parse_args()
    rng = random.Random(0)
    lengths = random.Random(1).choices(range(5, 17), [4, 6, 9, 11, 12, 12, 11, 9, 8, 7, 6, 5], k=args.captions)
    captions = [" ".join(rng.choices(WORDS, k=length)) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer is None:
            write_bert(folder, captions[:1000], vocab_size=200, width=32, heads=2)
        augment = WordAugment(HFTokenizer(args.tokenizer or folder, context_length=25))
    for name, seeds in (
        ("augmentation alone", range(args.captions)),
        (
            "with the sample's seed derived",
            (stream_seed(0, Purpose.WORDS, 0, position) for position in range(args.captions)),
        ),
    ):
        start = time.process_time()
        for caption, seed in zip(captions, seeds, strict=True):
            augment(caption, seed)
        seconds = time.process_time() - start
        print(f"{name}: {args.captions / seconds:,.0f} captions/s ({sum(lengths) / len(lengths):.1f} words each)")


if __name__ == "__main__":
    main()
