"""The folder of the study on photographs: data from tars, released encoders, and the aligned start of all runs.

    python -m scripts.photographs.prepare --tars DIR --study DIR     # DIR holds flickr8k.tar, products.tar, clothing.tar

Flickr8k (`captions.csv`: image, caption; `images/`) is divided by the SHA-256 of the file names: the first 1,000 photographs
are the test set, the next 1,000 validation, 6,091 training. Its shard holds five passes over the training photographs, each in
another order and with another caption, so that a fifth of it shows each photograph once. Done steps are not done again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl.shards.members import Sample, read_samples
from open_clip_zerovl.shards.writing import write_shard

HELD_OUT = 1000  # photographs of each held-out set
IMAGE_PX = 96
WIDTH = 256
TOKENS = 32


def flickr8k_split(names: Sequence[str]) -> dict[str, list[str]]:
    """The photographs of test, validation and train, by the SHA-256 of the file name."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {
        "test": ordered[:HELD_OUT],
        "validation": ordered[HELD_OUT : 2 * HELD_OUT],
        "train": ordered[2 * HELD_OUT :],
    }


def _flickr8k(raw: Path, study: Path) -> list[Sample]:
    """Write the tables of the held-out sets and of the training photographs; the training samples in their order."""
    captions: dict[str, list[str]] = {}
    with open(raw / "captions.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], []).append(row["caption"].strip())
    parts = flickr8k_split(list(captions))
    for part, names in parts.items():
        with open(
            study / "sets" / f"flickr8k-{part}.csv", "w", encoding="utf-8", newline=""
        ) as file:
            table = csv.writer(file)
            table.writerow(["filepath", "title"])
            for name in names:
                table.writerows([raw / "images" / name, caption] for caption in captions[name])
    samples = []
    for turn in range(5):
        order = sorted(parts["train"])
        random.Random(turn).shuffle(order)
        for name in order:
            caption = captions[name][turn % len(captions[name])]
            files = {"jpg": (raw / "images" / name).read_bytes(), "txt": caption.encode()}
            samples.append(Sample(f"{turn}_{Path(name).stem}", files))
    return samples


def _packed(folder: Path) -> list[Sample]:
    samples = [each for shard in sorted(folder.rglob("*.tar")) for each in read_samples(shard)]
    random.Random(0).shuffle(samples)
    return samples


def _write(study: Path, name: str, samples: list[Sample]) -> None:
    folder = study / "train" / name
    folder.mkdir(parents=True, exist_ok=True)
    count = write_shard(folder / "00000.tar", samples)
    (folder / "sizes.json").write_text(json.dumps({"00000.tar": count}), encoding="utf-8")
    print(f"{name}: {count:,} training samples", flush=True)


def _data(tars: Path, study: Path) -> None:
    for name in ("flickr8k", "products", "clothing"):
        with tarfile.open(tars / f"{name}.tar") as tar:
            tar.extractall(study / "raw", filter="data")
    raw, sets = study / "raw", study / "sets"
    sets.mkdir(exist_ok=True)
    pack = ["data", "pack", f"products={raw}/products/pairs.csv", "--out", f"{study}/packed"]
    columns = ["--picture-column", "image", "--caption-column", "caption"]
    _zerovl(*pack, *columns, "--pictures-in", f"{raw}/products", "--test-share", "0.1")
    _python("scripts.drawn", "emoji", "--out", f"{study}/emoji")
    _write(study, "flickr8k", _flickr8k(raw / "flickr8k", study))
    _write(study, "products", _packed(study / "packed" / "products" / "train"))
    _write(study, "noto", _packed(study / "emoji" / "noto"))
    shutil.copytree(study / "packed" / "products", sets / "products", dirs_exist_ok=True)
    shutil.copytree(study / "emoji" / "test" / "noto", sets / "noto", dirs_exist_ok=True)
    for split in ("train", "validation", "test"):
        shutil.copytree(raw / "clothing" / split, sets / "clothing", dirs_exist_ok=True)


def _start(study: Path) -> None:
    """Encoders, and heads aligned on the training pairs: the start of all runs."""
    encoders = study / "encoders"
    _python("scripts.encoders", "--out", str(encoders))
    config = encoders / "effnet_lite0" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content["pretrained_cfg"]["input_size"] = [3, IMAGE_PX, IMAGE_PX]
    config.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _zerovl(
        "data", "pack", f"flickr8k={study}/sets/flickr8k-train.csv", "--out", f"{study}/photographs"
    )
    data = f"flickr8k={study}/photographs/flickr8k/train/00000.tar"
    data += "".join(f"::{name}={study}/train/{name}/00000.tar" for name in ("products", "noto"))
    words = ["--image", f"timm:{encoders}/effnet_lite0", "--text", f"hf:{encoders}/minilm"]
    words += ["--embed-dim", str(WIDTH), "--context-length", str(TOKENS), "--data", data]
    words += ["--retrieval-data", f"flickr8k={study}/sets/flickr8k-validation.csv"]
    _zerovl("align", *words, "--out", f"{study}/aligned", "--workers", "1", "--device", "cpu")
    shutil.copytree(study / "aligned" / "model", study / "model", dirs_exist_ok=True)


def _zerovl(*words: str) -> None:
    _python("open_clip_zerovl.cli", *words)


def _python(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tars", type=Path, required=True, metavar="DIR")
    parser.add_argument("--study", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    study = given.study.resolve()
    study.mkdir(parents=True, exist_ok=True)
    if not (study / "sets" / "clothing").is_dir():
        _data(given.tars.resolve(), study)
    if not (study / "model").exists():
        _start(study)


if __name__ == "__main__":
    main()
