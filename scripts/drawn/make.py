"""The emoji sets as sources: fetched, drawn, split, and written as shards.

On disk (see docs/datasets.md):

    <source>/train-00000.tar ..., sizes.json, LICENSE      training pairs
    test/<source>/  val/<source>/                          the pairs held out of that source, for CLIP_benchmark
    test-across/<source>/  val-across/<source>/            every held-out concept as that source has it
    bert/                                                  vocabulary and configuration of a small text tower
    manifest.json                                          the inputs of this data
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.shards.files import write_retrieval_set, write_shard, write_source
from open_clip_zerovl.shards.tar import Sample, read_samples
from scripts.drawn.emoji import (
    PACKAGES,
    SOURCES,
    SPLITS,
    Drawing,
    is_blank,
    rasterise,
    read_sources,
    split_concepts,
)
from scripts.drawn.packages import fetch_npm_package, read_npm_package

#: In the order of their ids. [PAD] is 0, as open_clip and BERT expect.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PREFIX = "##"  # of a piece that continues a word
HELD_OUT = 200  # pairs of each source for the test, and as many for validation


def prepare_emoji(
    out: str | Path,
    *,
    px: int = 64,
    seed: int = 0,
    shard_size: int = 256,
    held_out_per_source: int = HELD_OUT,
    vocab_size: int = 2048,
) -> None:
    """Fetch, draw, split and write the data, unless it is there and was made with these settings.

    Packages and drawn pictures are kept in `OUT/.cache`, so that a call after an interruption goes on. The data is written
    aside and moved into place when whole.

    Args:
        out: a new or empty folder, or one that this function wrote.
        px: width and height of the pictures, in pixels.
        seed: decides which concepts are held out and the order of the training samples.
        shard_size: training samples a shard, at most.
        vocab_size: entries of the text tower's vocabulary, at most.

    Raises:
        UserError: a folder that holds other things, no npm, or a package that cannot be fetched.
    """
    out = Path(out)
    settings = [px, seed, shard_size, held_out_per_source, vocab_size]
    made_from = json.dumps([settings, list(map(str, PACKAGES.values()))]) + "\n"
    manifest, cache = out / "manifest.json", out / ".cache"
    if manifest.is_file() and manifest.read_text(encoding="utf-8") == made_from:
        print(f"The emoji data in {out} is complete and made with these settings: nothing to do.")
        return
    if out.is_dir() and any(out.iterdir()) and not cache.is_dir():
        raise UserError(f"{out} is not empty and holds no emoji data: give a new folder.")
    cache.mkdir(parents=True, exist_ok=True)
    bar = tqdm(PACKAGES.items(), desc="fetch packages", unit="package")
    tarballs = {key: fetch_npm_package(package, cache / "packages") for key, package in bar}
    drawings = read_sources(tarballs)
    pictures = {source: _draw(source, drawings[source], px, cache) for source in SOURCES}
    drawings = {
        source: {
            concept: each
            for concept, each in of_source.items()
            if not is_blank(pictures[source][concept])
        }
        for source, of_source in drawings.items()
    }
    split = split_concepts(drawings, held_out_per_source=held_out_per_source, seed=seed)
    held_out = {
        (source, concept): name
        for name, of_split in split.items()
        for source, concepts in of_split.items()
        for concept in concepts
    }

    def sample(source: str, concept: str) -> Sample:
        each = drawings[source][concept]
        facts = {
            "concept": concept, "group": each.group, "held_out": held_out.get((source, concept)), "source": source,
        }  # fmt: skip
        files = {"png": pictures[source][concept], "txt": each.caption.encode()}
        return Sample(f"{source}-{concept.lower()}", {**files, "json": json.dumps(facts).encode()})

    staging = cache / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    captions = []
    for number, (source, facts) in enumerate(SOURCES.items()):
        train = [
            concept for concept in sorted(drawings[source]) if (source, concept) not in held_out
        ]
        captions += [drawings[source][concept].caption for concept in train]
        # Shuffled on disk, so that a shard is a random sample of its source.
        order = np.random.default_rng([seed, 1 + number]).permutation(len(train))
        write_source(
            staging / source, [sample(source, train[j]) for j in order], shard_size=shard_size
        )
        print(f"{source}: {len(train):,} training pairs")
        folders = [staging / source]
        for name in SPLITS:
            every = sorted(concept for held in split[name].values() for concept in held)
            across = [concept for concept in every if concept in drawings[source]]
            for kind, concepts in ((name, split[name][source]), (f"{name}-across", across)):
                folders.append(staging / kind / source)
                write_retrieval_set(folders[-1], [sample(source, concept) for concept in concepts])
        for folder in folders:  # the licence goes wherever the pictures go
            write_atomically(folder / "LICENSE", _licence(facts, tarballs))
    write_bert(staging / "bert", captions, vocab_size=vocab_size)
    manifest.unlink(missing_ok=True)  # a killed call leaves data that counts as incomplete
    for path in sorted(staging.iterdir()):
        if (out / path.name).is_dir():
            shutil.rmtree(out / path.name)
        path.replace(out / path.name)
    staging.rmdir()
    write_atomically(manifest, made_from)


def _draw(source: str, drawings: Mapping[str, Drawing], px: int, cache: Path) -> dict[str, bytes]:
    """Draw each concept as a PNG, which the cache keeps in a tar of the source."""
    packages = "+".join(
        PACKAGES[key].file_name.removesuffix(".tgz") for key in SOURCES[source]["packages"]
    )
    drawn = cache / "pictures" / f"{source}-{px}px-{packages}.tar"
    if not drawn.is_file():
        bar = tqdm(drawings.items(), desc=f"draw {source}", unit="picture")
        write_shard(drawn, (Sample(concept, {"png": rasterise(e.svg, px)}) for concept, e in bar))
    return {sample.key: sample.files["png"] for sample in read_samples(drawn)}


def _licence(facts: Mapping[str, str], tarballs: Mapping[str, Path]) -> str:
    """Write the text of a LICENSE file: the licence of the drawings, and the licence texts in their packages."""
    names = ", ".join(str(PACKAGES[key]) for key in facts["packages"])
    parts = [
        f"The pictures in this folder: {facts['drawings_by']}.\nLicence: {facts['licence']} (SPDX: {facts['spdx']}).\n"
        f"Changes: rasterised on a white square, nothing else.\nDrawings from the npm package(s) {names}.\n"
    ]
    for key in facts["packages"]:
        texts = read_npm_package(
            tarballs[key], lambda name: name.lower() in {"license", "license.txt", "license.md"}
        )
        if not texts:
            parts.append(
                f"The package {PACKAGES[key]} names this licence in its metadata and ships no text of it.\n"
            )
        parts += [
            f"The package {PACKAGES[key]} ships this text as its {name} (a packager's own terms, where it differs from the "
            f"licence above):\n\n{text.decode().strip()}\n"
            for name, text in sorted(texts.items())
        ]
    return f"\n{'-' * 72}\n\n".join(parts)


def write_pairs(out: str | Path, folder: Path) -> int:
    """Write the training pairs of `prepare_emoji` as pictures and `pairs.csv` (filepath, title, site), and count them."""
    rows = [("filepath", "title", "site")]
    for source in SOURCES:
        for shard in sorted((Path(out) / source).glob("*.tar")):
            for sample in read_samples(shard):
                picture = Path("pictures", source, f"{sample.key}.png")
                (folder / picture).parent.mkdir(parents=True, exist_ok=True)
                (folder / picture).write_bytes(sample.files["png"])
                rows.append((str(picture), sample.files["txt"].decode(), source))
    with open(folder / "pairs.csv", "w", encoding="utf-8", newline="") as table:
        csv.writer(table).writerows(rows)
    return len(rows) - 1


def write_bert(
    folder: str | Path,
    captions: Iterable[str],
    *,
    vocab_size: int = 2048,
) -> None:
    """Train a vocabulary on captions, and write it with the configuration of a small BERT.

    The same captions in the same order give the same files. Captions are lower-cased and lose their accents.

    Args:
        folder: the folder of the files.
        captions: captions of the training set; held-out captions must not influence the vocabulary.
        vocab_size: entries of the vocabulary, at most, special tokens included.
    """
    vocabulary = _train_vocabulary(list(captions), vocab_size)
    config = {
        "model_type": "bert",
        "vocab_size": len(vocabulary),
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 384,
        "max_position_embeddings": 64,
    }
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 64}
    folder = Path(folder)
    write_atomically(folder / "vocab.txt", "".join(f"{piece}\n" for piece in vocabulary))
    write_atomically(folder / "tokenizer_config.json", json.dumps(tokenizer, indent=2) + "\n")
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _train_vocabulary(captions: list[str], vocab_size: int) -> list[str]:
    """Return pieces in the order of their ids: special tokens, then the alphabet, then merges by frequency."""
    tokenizer = Tokenizer(WordPiece({}, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder(prefix=_PREFIX)
    normalized = [tokenizer.normalizer.normalize_str(caption) for caption in captions]
    letters = {
        letter
        for caption in normalized
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(caption)
        for letter in word
    }
    # Every letter is a piece that begins a word and one that continues it, so that an unseen word of seen letters is never
    # [UNK].
    alphabet = [
        *sorted(letters),
        *(_PREFIX + letter for letter in sorted(letters) if letter.isalnum()),
    ]
    fixed = [*SPECIAL_TOKENS, *alphabet]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # The alphabet is given too: the trainer would number letters in the order of a hash table, which differs from process
        # to process, and it breaks ties between merges by these numbers.
        special_tokens=fixed,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=False)
    learned = sorted(ids.keys() - set(fixed), key=ids.__getitem__)
    return [*fixed, *learned]
