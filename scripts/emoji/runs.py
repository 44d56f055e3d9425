"""Trainings on the emoji sources: their flags, their processes, their measurements.

The demo (two runs) and the ablation (the paper's tables) share the hyperparameters and the held-out pairs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.bias.measures import mean_log_p_negatives, source_probe_accuracy
from open_clip_zerovl.evaluate.bias.pools import POOLS, SourceFeatures, pool_metrics
from open_clip_zerovl.evaluate.retrieval.examples import middle_of_each
from open_clip_zerovl.prepare.drawn.make import DrawnSample
from scripts.emoji.records import RunRecord, read_training_log

SOURCES = ("noto", "twemoji", "openmoji", "fluent")
MICRO_BATCH, DGA_STEPS = 32, 2  # effective batch 64

# ---------------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------------


def drawn_flags(
    data: Path,
    *,
    sampling: str,
    epochs: int,
    seed: int,
    sources: Sequence[str] = SOURCES,
    more: Sequence[str] = (),
) -> list[str]:
    """The training flags of `make demo` and `make ablation`, chosen on the validation split (docs/models.md).

    Args:
        data: the folder of `zerovl data emoji` or `zerovl data icons`.
        sources: those of its folders that are trained on.
        more: further training flags, which replace those of the same name; `--warmup` replaces the share of the steps.
    """
    flags = [
        "--model", "zerovl-emoji", "--text-model", str(data / "bert"),
        "--train-data", "::".join(f"{source}={data / source}" for source in sources), "--sampling", sampling,
        "--batch-size", str(MICRO_BATCH), "--dga-steps", str(DGA_STEPS), "--dga-retain", "auto",
        "--epochs", str(epochs), "--lr", "1e-3", "--lr-min", "1e-4", "--wd", "0.1", "--warmup-share", "0.05",
        "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6",
        "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)",
        "--precision", "fp32", "--workers", "0", "--seed", str(seed),
        "--log-every-n-steps", "10", "--save-frequency", "0",
    ]  # fmt: skip
    return merge_flags(flags, more)


def merge_flags(base: Sequence[str], more: Sequence[str]) -> list[str]:
    """`base` without the flags that `more` names, then `more`.

    Raises:
        UserError: `more` does not begin with a flag.
    """
    named = {group[0] for group in _groups(more)}
    if "--warmup" in named:  # the same setting in steps
        named.add("--warmup-share")
    return [word for group in _groups(base) if group[0] not in named for word in group] + _words(more)


def flag_names(flags: Sequence[str]) -> list[str]:
    """The names of the flags, in order, without values."""
    return [group[0] for group in _groups(flags)]


def flag_values(flags: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag, by its name; of a flag that comes twice the last ones."""
    return {group[0]: group[1:] for group in _groups(flags)}


def flag_value(flags: Sequence[str], name: str) -> str:
    """The last single value of a flag.

    Raises:
        KeyError: the flag is not there.
    """
    return flag_values(flags)[name][-1]


def _words(flags: Sequence[str]) -> list[str]:
    """`--flag=value` as two words."""
    return [part for word in flags for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _groups(flags: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for word in _words(flags):
        if word.startswith("--"):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise UserError(f"training flags begin with --, but the first of these is {word!r}")
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """One run of `training.main`.

    Attributes:
        folder: the run's folder, --logs/--name.
        flags: all other flags.
        ranks: processes; torchrun starts more than one.
    """

    folder: Path
    flags: tuple[str, ...]
    ranks: int = 1

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"epoch_{flag_value(self.flags, '--epochs')}.pt"

    @property
    def log(self) -> Path:
        return self.folder / "out.log"

    @property
    def errors(self) -> Path:
        """The file with the processes' standard error."""
        return self.folder.with_name(self.folder.name + ".err")

    @property
    def asked(self) -> Path:
        """The file with the flags of the run that is in `folder`."""
        return self.folder.with_name(self.folder.name + ".flags.json")

    def command(self) -> list[str]:
        """The command line of the run."""
        launch = ["-m", "training.main"]
        if self.ranks > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", *launch, "--"]
        return [
            sys.executable, *launch, *self.flags, "--logs", str(self.folder.parent), "--name", self.folder.name,
        ]  # fmt: skip

    def is_finished(self) -> bool:
        """Whether the last checkpoint exists and the run had these flags."""
        return self.checkpoint.is_file() and self.was_asked_for()

    def was_asked_for(self) -> bool:
        """Whether the run in the folder was started with these flags."""
        return self.asked.is_file() and json.loads(self.asked.read_text(encoding="utf-8")) == self._identity()

    def start(self) -> subprocess.Popen:
        """Start from an empty folder, with one thread a process: small models scale badly over threads."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.asked.write_text(json.dumps(self._identity()) + "\n", encoding="utf-8")
        with self.errors.open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                self.command(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )

    def last_error(self) -> str:
        """The last line of standard error."""
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def _identity(self) -> dict[str, Any]:
        return {"flags": list(self.flags), "ranks": self.ranks}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """The held-out pairs of all sources, in one order.

    Attributes:
        samples: (P,)
        rows: source -> which of the source's samples are held out of it.
    """

    samples: list[DrawnSample]
    rows: dict[str, Tensor]

    @classmethod
    def of(cls, samples: Mapping[str, list[DrawnSample]]) -> Pool:
        rows = {
            source: torch.tensor([index for index, sample in enumerate(own) if sample.held_out])
            for source, own in samples.items()
        }
        return cls([samples[source][row] for source, held_out in rows.items() for row in held_out.tolist()], rows)

    @property
    def sources(self) -> list[str]:
        return [sample.source for sample in self.samples]

    def features(self, by_source: Mapping[str, SourceFeatures]) -> tuple[Tensor, Tensor]:
        """Image and text features of the pool (P, D)."""
        return (
            torch.cat([by_source[source].image_features[rows] for source, rows in self.rows.items()]),
            torch.cat([by_source[source].text_features[rows] for source, rows in self.rows.items()]),
        )

    def queries(self) -> list[int]:
        """One caption of each source for the picture: the middle one, whatever its results."""
        return middle_of_each(self.sources)


@dataclass
class Encoder:
    """Encodes samples with one model. Transformed pictures are kept in `ready` for the next model with the same transform."""

    model: torch.nn.Module
    preprocess: Callable[[Any], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    ready: dict[tuple[str, int], tuple[Any, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Path, ready: dict[tuple[str, int], tuple[Any, Tensor]] | None = None) -> Encoder:
        """A checkpoint's encoder; encoders that share `ready` share their transformed pictures."""
        return cls(*load_model(checkpoint), {} if ready is None else ready)

    @property
    def logit_scale(self) -> float:
        scale = self.model.logit_scale
        assert isinstance(scale, Tensor)
        return scale.exp().item()

    @torch.inference_mode()
    def __call__(self, samples: list[DrawnSample]) -> SourceFeatures:
        """L2-normalised features of one source's samples."""
        key = (repr(self.preprocess), id(samples))
        if key not in self.ready:  # the list is kept with its pictures, so that no other object gets its id
            self.ready[key] = (samples, torch.stack([self.preprocess(sample.image) for sample in samples]))
        texts = self.tokenizer([sample.caption for sample in samples])
        model: Any = self.model
        return SourceFeatures(
            image_features=model.encode_image(self.ready[key][1], normalize=True),
            text_features=model.encode_text(texts, normalize=True),
            concepts=[sample.concept for sample in samples],
            held_out=[sample.held_out for sample in samples],
        )


def measure(
    run: TrainingRun, encoder: Encoder, samples: Mapping[str, list[DrawnSample]], pool: Pool, *, seed: int
) -> tuple[RunRecord, tuple[Tensor, Tensor, float]]:
    """A run's record (RSUM in three pools, source probe, log p of negatives), and its features (P, D) and logit scale."""
    by_source = {source: encoder(own) for source, own in samples.items()}
    pools = pool_metrics(by_source)
    images, texts = pool.features(by_source)
    record = RunRecord(
        loss_curve=read_training_log(run.log),
        rsum={name: pools[name] for name in POOLS},
        **signs_of_bias(images, texts, encoder.logit_scale, pool, seed),
    )
    return record, (images, texts, encoder.logit_scale)


def signs_of_bias(images: Tensor, texts: Tensor, logit_scale: float, pool: Pool, seed: int) -> dict[str, Any]:
    """The source probe's accuracies and the mean log p of negatives of a pool's features (P, D); None with one source."""
    if len(pool.rows) < 2:
        names = ("probe_images", "probe_texts", "probe_chance", "log_p_same_source", "log_p_other_source")
        return dict.fromkeys(names)
    concepts = [sample.concept for sample in pool.samples]
    log_p = mean_log_p_negatives(images, texts, pool.sources, logit_scale)["mean"]
    return {
        "probe_images": source_probe_accuracy(images, pool.sources, concepts=concepts, seed=seed),
        "probe_texts": source_probe_accuracy(texts, pool.sources, concepts=concepts, seed=seed),
        "probe_chance": 1 / len(pool.rows),
        "log_p_same_source": log_p["same_source"],
        "log_p_other_source": log_p["other_source"],
    }
