"""Trainings on drawn sources: the demo's flags, and a run's folder and process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import TrainingProcess, start_training
from scripts.drawn.emoji import EMOJI

MICRO_BATCH, DGA_STEPS = 32, 2  # effective batch 64


def drawn_flags(
    data: Path,
    *,
    sampling: str,
    epochs: int,
    seed: int,
    more: Sequence[str] = (),
) -> list[str]:
    """The training flags of `make demo`, chosen on the validation split (docs/models.md).

    Args:
        data: the folder that `python -m scripts.drawn` wrote.
        more: further training flags, which replace those of the same name; `--warmup` replaces the share of the steps.

    Raises:
        UserError: `more` does not begin with a flag.
    """
    base = [
        "--model", "zerovl-emoji", "--text-model", str(data / "bert"),
        "--train-data", "::".join(f"{source}={data / source}" for source in EMOJI.sources), "--sampling", sampling,
        "--batch-size", str(MICRO_BATCH), "--dga-steps", str(DGA_STEPS), "--dga-retain", "auto",
        "--epochs", str(epochs), "--lr", "1e-3", "--lr-min", "1e-4", "--wd", "0.1", "--warmup-share", "0.05",
        "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6",
        "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)",
        "--precision", "fp32", "--workers", "0", "--seed", str(seed),
        "--log-every-n-steps", "10", "--save-frequency", "0",
    ]  # fmt: skip
    own = grouped(more)
    named = {group[0] for group in own}
    if "--warmup" in named:  # the same setting in steps
        named.add("--warmup-share")
    return [
        word
        for group in [*(one for one in grouped(base) if one[0] not in named), *own]
        for word in group
    ]


def grouped(flags: Sequence[str]) -> list[list[str]]:
    """Each flag with its values; `--flag=value` as two words.

    Raises:
        UserError: the first word is not a flag.
    """
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            groups.append(word.split("=", 1))
        elif groups:
            groups[-1].append(word)
        else:
            raise UserError(f"training flags begin with --, but the first of these is {word!r}")
    return groups


def flag_values(flags: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag, by its name; of a flag that comes twice the last ones."""
    return {name: values for name, *values in grouped(flags)}


@dataclass(frozen=True)
class TrainingRun:
    """One run of the training program.

    Attributes:
        folder: the run's folder, --logs/--name.
        flags: all other flags.
    """

    folder: Path
    flags: tuple[str, ...]

    @property
    def checkpoint(self) -> Path:
        """The last one."""
        return self.folder / "checkpoints" / f"epoch_{flag_values(self.flags)['--epochs'][-1]}.pt"

    @property
    def log(self) -> Path:
        return self.folder / "out.log"

    @property
    def words(self) -> Path:
        """The file with the processes' standard output and error."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def asked(self) -> Path:
        """The file with the flags of the run that is in `folder`."""
        return self.folder.with_name(f"{self.folder.name}.flags.json")

    @property
    def was_asked_for(self) -> bool:
        """True if the run in the folder was started with these flags."""
        return (
            self.asked.is_file()
            and json.loads(self.asked.read_text(encoding="utf-8")) == self._identity()
        )

    @property
    def is_finished(self) -> bool:
        """True if the last checkpoint exists and the run had these flags."""
        return self.checkpoint.is_file() and self.was_asked_for

    def start(self, *, resume: bool = False) -> TrainingProcess:
        """Start with one thread a process: small models scale badly over threads.

        Args:
            resume: go on from the newest checkpoint of the same flags; else the run begins in an empty folder.
        """
        if not (resume and self.was_asked_for):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.words.unlink(missing_ok=True)
            self.asked.write_text(json.dumps(self._identity()) + "\n", encoding="utf-8")
        place = ["--logs", str(self.folder.parent), "--name", self.folder.name]
        place += ["--resume", "latest"] if resume else []
        return start_training([*self.flags, *place], log=self.words, threads=1)

    def _identity(self) -> dict[str, Any]:
        return {"flags": list(self.flags)}
