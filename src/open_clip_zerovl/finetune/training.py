"""The training of a fine-tuning: a process of its own, watched by the scores that it writes after each epoch.

It ends early where the score has not risen for some epochs; of its checkpoints the best and the newest are kept. A call that
was killed continues where its training stopped.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import start_training

RUN = "run"
LOG = "training.log"
SCORES = {"rsum": "RSUM {:.1f}", "top1": "zero-shot top-1 {:.1f} %"}
_EPOCH = re.compile(r"epoch_(\d+)\.pt")
_ETA = re.compile(r" ETA: ([^\n]+)\n")
_ETA_SECONDS = 60.0  # between two lines with the time left
_TAIL_BYTES = 1 << 16
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Training:
    """A run in OUT/run.

    Attributes:
        out: the fine-tuning's folder.
        arguments: arguments of the training program, without those of its folder.
        processes: ranks.
        epochs: number of epochs of a run that is not stopped early.
        patience: epochs without a better score after which it is stopped; 0 for never.
        sets: held-out sets, whose mean RSUM or zero-shot top-1 in percent is the score.
        measure: key of SCORES.
    """

    out: Path
    arguments: Sequence[str]
    processes: int
    epochs: int
    patience: int
    sets: tuple[str, ...]
    measure: str = "rsum"

    @property
    def checkpoints(self) -> Path:
        return self.out / RUN / "checkpoints"

    def scores(self) -> dict[int, float]:
        """Read the mean score over the sets of each epoch that has ended."""
        file = self.checkpoints / "results.jsonl"
        mean_scores: dict[int, float] = {}
        # A line without its end is being written.
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
        for line in lines:
            row = json.loads(line)
            keys = [f"{name}_{self.measure}" for name in self.sets]
            values = [row[key] for key in keys if key in row]
            if len(values) == len(keys):
                mean_scores[row["epoch"]] = (
                    (100 if self.measure == "top1" else 1) * sum(values) / len(values)
                )
        return mean_scores

    def saved(self) -> dict[int, Path]:
        """Find the checkpoints of epochs."""
        files = self.checkpoints.glob("epoch_*.pt")
        return {int(match[1]): path for path in files if (match := _EPOCH.fullmatch(path.name))}

    def best(self) -> tuple[int, Path] | None:
        """Find the epoch with the best score among those with a checkpoint, the earlier of two equal ones.

        Returns:
            None before the first.
        """
        scores, saved = self.scores(), self.saved()
        both = [epoch for epoch in saved if epoch in scores]
        if not both:
            return None
        epoch = max(both, key=lambda epoch: (scores[epoch], -epoch))
        return epoch, saved[epoch]

    def is_over(self) -> bool:
        """Return whether the last epoch is saved, or the score has not risen for `patience` epochs."""
        return self.epochs in self.saved() or self.gave_up()

    def gave_up(self) -> bool:
        """Return whether the last `patience` epochs brought no better score."""
        scores = self.scores()
        if not self.patience or not scores:
            return False
        best = max(scores, key=lambda epoch: (scores[epoch], -epoch))
        return max(scores) - best >= self.patience

    def prune(self) -> None:
        """Delete all checkpoints of epochs but the best and the newest."""
        saved, best = self.saved(), self.best()
        for epoch, path in saved.items():
            if epoch != max(saved) and best is not None and epoch != best[0]:
                path.unlink(missing_ok=True)


def train(training: Training, say: Callable[[str], None]) -> tuple[int, Path]:
    """Run the training, or the rest of it, to its end.

    Args:
        say: is called with a line at the start, and one for each epoch.

    Returns:
        The best epoch and its checkpoint.

    Raises:
        UserError: the training failed (its last words are in the sentence), or was stopped.
        KeyboardInterrupt: Ctrl-C, after the training has saved a checkpoint.
    """
    if not training.is_over():
        _run(training, say)
    training.prune()
    best = training.best()
    if best is None:
        raise UserError(
            f"the training left no scored checkpoint in {training.checkpoints}; see {training.out / LOG}"
        )
    return best


def _run(training: Training, say: Callable[[str], None]) -> None:
    arguments = [
        *training.arguments,
        "--logs",
        str(training.out),
        "--name",
        RUN,
        "--resume",
        "latest",
    ]
    said = set(training.scores())  # of an earlier call
    if said:
        say(f"going on after epoch {max(said)}")
    say(f"training; its lines are in {training.out / LOG}")
    log = training.out / LOG
    log_begin = log.stat().st_size if log.is_file() else 0
    child = start_training(arguments, training.processes, log=log)
    stopping, eta_after = False, 0.0
    try:
        while child.process.poll() is None:
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() > eta_after and (eta := last_eta(log, log_begin)) is not None:
                say(f"about {eta} left if all {training.epochs} epochs are needed")
                eta_after = time.monotonic() + _ETA_SECONDS
            _report(training, said, say)
            training.prune()
            if not stopping and training.gave_up() and child.process.poll() is None:
                say(f"no better score for {training.patience} epochs: training ends")
                child.process.terminate()
                stopping = True
    except BaseException:
        child.stop()
        raise
    _report(training, said, say)
    if not training.is_over():
        child.check()


def last_eta(log: Path, begin_bytes: int) -> str | None:
    """Read the time left from the newest line of a training's log after its first `begin_bytes`.

    Returns:
        None if no line has one.
    """
    with open(log, "rb") as file:
        file.seek(max(begin_bytes, log.stat().st_size - _TAIL_BYTES))
        etas = _ETA.findall(file.read().decode("utf-8", errors="replace"))
    return etas[-1] if etas else None


def _report(training: Training, said: set[int], say: Callable[[str], None]) -> None:
    scores = training.scores()
    for epoch in sorted(scores.keys() - said):
        so_far = [score for earlier, score in scores.items() if earlier < epoch]
        note = ", the best so far" if not so_far or scores[epoch] > max(so_far) else ""
        score = SCORES[training.measure].format(scores[epoch])
        say(f"epoch {epoch} of {training.epochs}: {score} on {', '.join(training.sets)}{note}")
        said.add(epoch)
