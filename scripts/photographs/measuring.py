"""Scores of a checkpoint of the study; captions are encoded once, since no run changes the text tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.evaluate.retrieval.metrics import retrieval_metrics
from open_clip_zerovl.evaluate.zero_shot.sets import CLIP_TEMPLATES
from open_clip_zerovl.models.local_dir import LOCAL_DIR

IMAGES_AT_ONCE = 8
Transform = Callable[[Any], Tensor]


def _blocks(items: list, size: int) -> Iterator[list]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


class Measuring:
    """The sets of a study with their captions' features, kept in a file.

    Args:
        study: the folder of the study; `texts.pt` in it holds the features.
    """

    def __init__(self, study: Path) -> None:
        self.study = study
        self.classes = sorted(each.name for each in (study / "sets" / "clothing").iterdir())
        self.file = study / "texts.pt"
        self.texts: dict[str, Tensor] = (
            torch.load(self.file, weights_only=True) if self.file.is_file() else {}
        )

    def _captions(self, name: str, captions: list[str]) -> Tensor:
        if name not in self.texts:
            model, _, tokenizer = load_model(LOCAL_DIR + str(self.study / "model"))
            with torch.inference_mode():
                parts = [
                    model.encode_text(tokenizer(block), normalize=True)
                    for block in _blocks(captions, 32)
                ]
            self.texts[name] = torch.cat(parts).clone()
            torch.save(self.texts, self.file)
        return self.texts[name]

    def __call__(self, checkpoint: Path, pilot: bool) -> dict[str, float]:
        """Scores of a checkpoint: of a pilot on Flickr8k's validation photographs, else on all test sets.

        Returns:
            `SET_rsum`, `SET_mean_recall` and recalls in percent of each set with captions; `clothing_top1`.
        """
        model, preprocess, _ = load_model(checkpoint)
        model = model.eval().to(memory_format=torch.channels_last)
        scores: dict[str, float] = {}
        names = {"flickr8k": f"flickr8k-{'validation' if pilot else 'test'}.csv"}
        if not pilot:
            names |= {"products": "products", "noto": "noto"}
        for name, place in names.items():
            scores |= {
                f"{name}_{key}": value
                for key, value in self.captioned(model, preprocess, place).items()
            }
        if not pilot:
            folder = self.study / "sets" / "clothing"
            scores["clothing_top1"] = self.labelled(model, preprocess, folder)
        return {key: round(value, 3) for key, value in scores.items()}

    def captioned(self, model: Any, preprocess: Transform, place: str) -> dict[str, float]:
        """Recalls in percent, `rsum` and `mean_recall` of a set of the study with captions."""
        samples = open_retrieval_set(self.study / "sets" / place)
        captions = [caption for texts in samples.captions() for caption in texts]
        owner = [index for index, texts in enumerate(samples.captions()) for _ in texts]
        texts = self._captions(place, captions)
        images = _encode(model, preprocess, len(samples), samples.image)
        metrics = retrieval_metrics(images, texts, owner)
        scores = {key: value if key == "rsum" else 100 * value for key, value in metrics.items()}
        return scores | {"mean_recall": metrics["rsum"] / 6}

    def labelled(self, model: Any, preprocess: Transform, folder: Path) -> float:
        """Zero-shot top-1 in percent of a folder with the classes of clothing."""
        prompts = [each.replace("{}", name) for name in self.classes for each in CLIP_TEMPLATES]
        texts = self._captions("clothing", prompts)
        texts = texts.view(len(self.classes), len(CLIP_TEMPLATES), -1)
        files = [file for name in self.classes for file in sorted((folder / name).iterdir())]
        images = _encode(
            model, preprocess, len(files), lambda index: Image.open(files[index]).convert("RGB")
        )
        scores = images @ F.normalize(texts.mean(1), dim=-1).T
        truth = torch.tensor([self.classes.index(file.parent.name) for file in files])
        return 100 * (scores.argmax(1) == truth).double().mean().item()


@torch.inference_mode()
def _encode(
    model: Any,
    preprocess: Transform,
    count: int,
    read: Callable[[int], Image.Image],
) -> Tensor:
    parts = [
        model.encode_image(
            torch.stack([preprocess(read(index)) for index in block]), normalize=True
        )
        for block in _blocks(list(range(count)), IMAGES_AT_ONCE)
    ]
    return torch.cat(parts)
