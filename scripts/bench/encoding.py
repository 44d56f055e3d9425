"""The cost of encoding pictures and captions as retrieval does, beside its arithmetic.

    python -m scripts.bench.encoding [--pictures 64] [--batch 64] [--rounds 7] [--out FILE.json]

    pictures    `retrieval_batches` and `FrozenModel.images`: from a tar to embeddings
    captions    `FrozenModel.texts` on the captions of the same batches, five a picture, from 4 to 20 words
    decoding    the same JPEGs by PIL and the model's transform alone
    tokenizing  the same captions by the model's tokenizer alone
    tower       the bare forward pass on these batches; captions are cut to the longest of a batch

Ways take turns in each round, and a cell is the median over rounds of this process's CPU time, which other programs hardly
change. The ratio is that of the first rows to the sum of their parts. Weights are random, since no number depends on them.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image

from open_clip_zerovl.data.sets import open_retrieval_set, retrieval_batches
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.shards.files import write_shard
from open_clip_zerovl.shards.tar import Sample
from scripts.bench.harness import register, write
from scripts.bench.loader import photograph
from scripts.tables import markdown_table

CAPTIONS = 5  # of a picture
PARTS = {"pictures": ("decoding", "image tower"), "captions": ("tokenizing", "text tower")}


def captions_of(picture: int) -> list[str]:
    """Make captions of a picture, of 4 to 20 words of the made-up vocabulary."""
    lengths = [4 + (7 * picture + 5 * number) % 17 for number in range(CAPTIONS)]
    return [" ".join(f"w{(picture + word) % 900}" for word in range(n)) for n in lengths]


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Measure the user and system time of this process, all threads, in a call."""
    before = time.process_time()
    with torch.no_grad():
        call()
    return time.process_time() - before


def ways(model_name: str, pictures: int, batch: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Make the call of each row."""
    name = register(model_name, 0.0, folder)
    model, _, transform = create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    frozen = FrozenModel.of("bench", (model.eval(), transform, tokenizer, torch.device("cpu")))
    jpegs = [photograph(number, 640, 480) for number in range(pictures)]
    samples = (
        Sample(f"{n:05d}", {"jpg": jpeg, "txt": "\n".join(captions_of(n)).encode()})
        for n, jpeg in enumerate(jpegs)
    )
    (folder / "test").mkdir()
    write_shard(folder / "test/0.tar", samples)
    (folder / "dataset_type.txt").write_text("retrieval")
    (folder / "test/nshards.txt").write_text("1")
    dataset = open_retrieval_set(folder)
    assert frozen.picture_transform is not None
    batches = list(retrieval_batches(dataset, transform, batch_size=batch))
    texts = [[text for of_picture in captions for text in of_picture] for _, captions in batches]
    tokens = [tokenizer(of_batch) for of_batch in texts]
    cut = [part[:, : int((part != 0).any(dim=0).nonzero()[-1]) + 1] for part in tokens]

    def product() -> None:
        for pixels, _ in retrieval_batches(dataset, transform, batch_size=batch):
            frozen.images(pixels)

    return {
        "pictures": product,
        "decoding": lambda: [transform(Image.open(io.BytesIO(jpeg))) for jpeg in jpegs],
        "image tower": lambda: [model.encode_image(pixels) for pixels, _ in batches],
        "captions": lambda: [frozen.texts(of_batch) for of_batch in texts],
        "tokenizing": lambda: [tokenizer(of_batch) for of_batch in texts],
        "text tower": lambda: [model.encode_text(part) for part in cut],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="zerovl-ViT-B-32-BERT-base", help="with a BERT, or tiny")
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="pictures at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        calls = ways(args.model, args.pictures, args.batch, Path(folder))
        for call in calls.values():  # the first call warms up
            cpu_seconds(call)
        rounds = [
            {name: cpu_seconds(call) for name, call in calls.items()} for _ in range(args.rounds)
        ]
    medians = {name: statistics.median(of[name] for of in rounds) for name in calls}
    ratios = {
        whole: statistics.median(of[whole] / sum(of[part] for part in parts) for of in rounds)
        for whole, parts in PARTS.items()
    }
    cells = [
        [name, f"{value:.3f}", f"{ratios[name]:.2f}" if name in ratios else ""]
        for name, value in medians.items()
    ]
    table = markdown_table(["", "CPU seconds", "of the arithmetic"], cells)
    write(
        {"arguments": vars(args) | {"out": None}, "rounds": rounds, "ratios": ratios, "torch": torch.__version__},
        table, args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
