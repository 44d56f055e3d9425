"""What `make ablation` trains, and which tables of the paper it compares.

A condition is a run of the training program with the demo's flags (`emoji.runs.emoji_flags`: debiased sampling, effective batch
64 as two micro-batches of 32) and those that it names. A comparison names two conditions, the paper's numbers for both, and the
paper's claim. Both were written down before any result, and no row is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Claim = Literal["higher", "lower", "same", "different"]


@dataclass(frozen=True)
class Condition:
    """A configuration, trained once for each seed.

    Attributes:
        label: in tables and figures.
        sampling: value of --sampling.
        flags: training flags that differ from the demo's.
        data: "emoji", the four sources; "context", one of them in two halves (A.5); "clusters", all in one, clustered (A.6).
        ranks: processes under torchrun, on gloo.
        epochs: passes over the data for each pass over the four sources, so that every run has as many samples.
        init_from: the condition whose last checkpoint of the same seed it starts from.
        clusters_of: the condition whose image features of the same seed make the clusters.
    """

    label: str
    sampling: str = "debiased"
    flags: tuple[str, ...] = ()
    data: Literal["emoji", "context", "clusters"] = "emoji"
    ranks: int = 1
    epochs: int = 1
    init_from: str | None = None
    clusters_of: str | None = None

    @property
    def needs(self) -> str | None:
        """The condition whose run of the same seed has to come first."""
        return self.init_from or self.clusters_of


def _batch(micro_batch: int, steps: int, *more: str) -> tuple[str, ...]:
    """An effective batch of `micro_batch * steps` on one rank, logged about every 640 samples."""
    every = max(1, 640 // (micro_batch * steps))
    flags = ("--batch-size", str(micro_batch), "--dga-steps", str(steps), "--log-every-n-steps", str(every))
    return (*flags, *more)


_TWO_RANKS = ("--batch-size", "32", "--dga-steps", "1")
_VIT = ("--model", "zerovl-emoji-vit", "--coin-flip-mixup")
CLUSTERS = 8

CONDITIONS: dict[str, Condition] = {
    "random": Condition("random", sampling="random"),
    "debiased": Condition("debiased"),
    "mixup": Condition("debiased + mixup", flags=("--coin-flip-mixup",)),
    "sequential": Condition(
        "sequential, fluent last",
        sampling="sequential",
        flags=("--source-order", "noto::twemoji::openmoji::fluent"),
    ),
    "sequential-reversed": Condition(
        "sequential, noto last",
        sampling="sequential",
        flags=("--source-order", "fluent::openmoji::twemoji::noto"),
    ),
    "detached-gather": Condition(
        "gather without gradient", flags=(*_TWO_RANKS, "--ablate", "detached-gather"), ranks=2
    ),
    "gather": Condition("gather with gradient", flags=_TWO_RANKS, ranks=2),
    "batch-64": Condition("batch 64, no DGA", flags=_batch(64, 1)),
    "batch-256": Condition("batch 256, no DGA", flags=_batch(256, 1)),
    # No graph is retained, so that all is forwarded twice as in the paper; "auto" would keep all eight small graphs.
    "dga-256": Condition("batch 256, DGA 8 x 32", flags=_batch(32, 8, "--dga-retain", "0")),
    "no-replay": Condition(
        "batch 256, DGA, other masks", flags=_batch(32, 8, "--dga-retain", "0", "--ablate", "no-replay")
    ),
    "vit": Condition("ViT, trained whole", flags=_VIT),
    "token-drop": Condition("ViT, TokenDrop 0.25", flags=(*_VIT, "--token-drop", "0.25")),
    "auxiliary": Condition("ViT beside a frozen BERT", flags=(*_VIT, "--freeze", "text"), init_from="mixup"),
    "context-random": Condition("two contexts, random", sampling="random", data="context", epochs=4),
    "context-debiased": Condition("two contexts, debiased", data="context", epochs=4),
    # A source is drawn for each step, as in the paper's released code: the exact draw refuses clusters smaller than a batch.
    "clusters": Condition(
        f"debiased over {CLUSTERS} clusters",
        flags=("--debiased-draw", "iid"),
        data="clusters",
        clusters_of="random",
    ),
}


@dataclass(frozen=True)
class Comparison:
    """A row of the paper that compares two of its runs, and the two conditions here that repeat them.

    Attributes:
        run, against: conditions.
        claim: whether the paper's number of `run` is higher or lower than that of `against`, the same, or different.
        what: the sentence's subject.
        measure: "rsum", or "cpu_seconds" of training.
        paper: (COCO, Flickr30K) RSUM of `run` and of `against`, or GPU hours of each; None where the paper draws bars.
    """

    run: str
    against: str
    claim: Claim
    what: str
    measure: Literal["rsum", "cpu_seconds"] = "rsum"
    paper: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table or section of the paper, and its comparisons."""

    name: str
    title: str
    setting: str
    comparisons: tuple[Comparison, ...]
    curves: tuple[tuple[str, ...], ...] = ()  # panels of loss curves, each with some conditions

    @property
    def conditions(self) -> list[str]:
        """The compared conditions, in the order of CONDITIONS."""
        named = {name for one in self.comparisons for name in (one.run, one.against)}
        return [name for name in CONDITIONS if name in named]


TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        "Table 3",
        "Debiased sampling and coin-flip mixup",
        "One process, effective batch 64. The paper: 14 M pairs of four sources, batch 1,024, gather without gradient.",
        (
            Comparison("debiased", "random", "higher", "Debiased sampling", paper=((392.3, 510.1), (371.6, 483.3))),
            Comparison("mixup", "debiased", "higher", "Coin-flip mixup on top", paper=((402.8, 519.2), (392.3, 510.1))),
        ),
    ),
    PaperTable(
        "Table 4",
        "Gradient-reserved gather",
        "Two processes of 32 pairs each (torchrun, gloo), no DGA, no mixup. The paper: 8 GPUs of 128.",
        (
            Comparison(
                "gather",
                "detached-gather",
                "higher",
                "Keeping the gradient of gathered features",
                paper=((415.0, 524.1), (402.8, 519.2)),
            ),
        ),
    ),
    PaperTable(
        "Table 5",
        "DGA against a true large batch",
        "Batches of 64 and 256, whole and as micro-batches of 32, all at one learning rate (the paper mentions scaling it). "
        "The gradient's formula is the same, but dropout masks are drawn per micro-batch, so the runs differ like two seeds. "
        "Without mixup, whose partner would be within the micro-batch. "
        "2 x 32 is the run `debiased`, which keeps both graphs; 8 x 32 keeps none and forwards all twice.",
        (
            Comparison(
                "debiased", "batch-64", "same", "DGA 2 x 32 at batch 64", paper=((424.1, 532.2), (424.4, 531.8))
            ),
            Comparison(
                "dga-256", "batch-256", "same", "DGA 8 x 32 at batch 256", paper=((425.2, 535.9), (425.0, 536.2))
            ),
            Comparison(
                "batch-256",
                "batch-64",
                "higher",
                "The larger batch (same epochs and learning rate)",
                paper=((424.4, 531.8), (415.0, 524.1)),
            ),
            Comparison(
                "dga-256", "batch-64", "higher", "The time of DGA with 8 steps", "cpu_seconds", ((600.0,), (430.0,))
            ),
        ),
        curves=(("batch-64", "debiased"), ("batch-256", "dga-256")),
    ),
    PaperTable(
        "Table 6",
        "DGA with and without replayed randomness",
        "Batch 256 as 8 x 32, all forwarded twice; the text tower has dropout 0.1. The paper: 16 DGA steps.",
        (
            Comparison(
                "dga-256",
                "no-replay",
                "higher",
                "Replaying the dropout masks",
                paper=((425.2, 535.9), (413.4, 527.1)),
            ),
        ),
        curves=(("dga-256", "no-replay"),),
    ),
    PaperTable(
        "Table 7",
        "TokenDrop",
        "`zerovl-emoji-vit`, whose 16 patch tokens become 12, with debiased sampling and mixup. The paper: ViT-B/16, 196 "
        "tokens become 147.",
        (
            Comparison("token-drop", "vit", "same", "TokenDrop", paper=((424.8, 535.5), (425.2, 535.9))),
            Comparison("token-drop", "vit", "lower", "The time with TokenDrop", "cpu_seconds", ((470.0,), (680.0,))),
        ),
    ),
    PaperTable(
        "Table 8",
        "Auxiliary encoder",
        "The image tower of `zerovl-emoji-vit`, trained against the frozen text tower of the run `mixup`, and with a text "
        "tower that is trained too. All have the same epochs. The paper: ViT-B/32 with the BERT of the ViT-B/16 run.",
        (
            Comparison(
                "auxiliary", "vit", "same", "A frozen auxiliary text tower", paper=((381.2, 493.9), (379.5, 494.1))
            ),
            Comparison("auxiliary", "vit", "lower", "The time with it", "cpu_seconds", ((110.0,), (240.0,))),
        ),
    ),
    PaperTable(
        "A.4",
        "Sequential sampling",
        "Each batch from one source, the sources one after the other in each epoch, in two orders. The paper shows bars "
        "without numbers.",
        (
            Comparison("sequential", "random", "higher", "Sequential sampling, fluent last,"),
            Comparison("sequential-reversed", "random", "higher", "Sequential sampling, noto last,"),
            Comparison("sequential-reversed", "sequential", "different", "The order of the sources"),
            Comparison("debiased", "sequential", "higher", "Debiased sampling"),
            Comparison("debiased", "sequential-reversed", "higher", "Debiased sampling"),
        ),
    ),
    PaperTable(
        "A.5",
        "Context bias",
        "Twemoji only, in two halves: the longer captions have a red frame around the picture, the shorter ones none; four "
        "times the epochs, so that as many samples are seen. Within: the held-out pairs of one half. Across: all held-out "
        "pairs, each picture with the other half's frame, which misleads a model that relies on the frame. Mixed: all, each "
        "with its own frame. The paper: CC3M.",
        (
            Comparison(
                "context-debiased",
                "context-random",
                "higher",
                "Debiased sampling over the two contexts",
                paper=((239.5, 367.5), (211.8, 328.0)),
            ),
        ),
    ),
    PaperTable(
        "A.6",
        "Clusters as sources",
        f"The four sources as one, split into {CLUSTERS} clusters by `zerovl cluster` on image features of the run `random`. "
        "That run is also the baseline, because random sampling does not use sources. A cluster is drawn for each step in "
        "proportion to its size (`--debiased-draw iid`), since a small one may not fill a batch. The paper: 100 clusters.",
        (
            Comparison(
                "clusters",
                "random",
                "higher",
                "Debiased sampling over clusters",
                paper=((384.4, 511.1), (370.8, 502.5)),
            ),
        ),
    ),
)
