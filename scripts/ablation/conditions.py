"""What `make ablation` trains, and which tables of the paper it compares.

A condition is a run of the training program with the demo's flags (`emoji.runs.drawn_flags`: effective batch 64 as two micro-
batches of 32) and those that it names. A comparison names two conditions, the paper's numbers for both, and the paper's claim.
`protocol.py` says how runs are scored and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.ablation.protocol import MARGIN_RATIO, MARGIN_RSUM, Choices
from scripts.ablation.verdicts import Claim

START_EPOCHS = 8  # of the model that A.6's arms start from


@dataclass(frozen=True)
class Condition:
    """A configuration, trained once for each seed.

    Attributes:
        label: in tables and figures.
        sampling: value of --sampling.
        flags: training flags that differ from the demo's; `{NAME}` stands for a choice of the protocol.
        miniature: the sources, "emoji" or "icons".
        trained: which of them are trained on: "three", without the seed's unseen one; "one", the source after that; "four".
        kind: "plain"; "contexts", one source in two halves (A.5); "clusters", the trained sources as one, clustered (A.6);
            "groups", half of the captions replaced by the name of the picture's group.
        epochs: a number, or the choice that holds it.
        share: of these epochs, for runs of equal steps.
        ranks: processes under torchrun, on gloo.
        init_from: the condition whose last checkpoint of the same seed it starts from.
        clusters_of: the condition whose features of the same seed make the clusters.
        teacher: the condition whose last checkpoint of the same seed it is distilled from.
        sort_text: whether --sort-text is given: the same gradient in four fifths of the time.
        every_epoch: whether each epoch's checkpoint is scored.
    """

    label: str
    sampling: str = "debiased"
    flags: tuple[str, ...] = ()
    miniature: Literal["emoji", "icons"] = "emoji"
    trained: Literal["three", "one", "four"] = "three"
    kind: Literal["plain", "contexts", "clusters", "groups"] = "plain"
    epochs: int | str = "epochs"
    share: float = 1.0
    ranks: int = 1
    init_from: str | None = None
    clusters_of: str | None = None
    teacher: str | None = None
    sort_text: bool = True
    every_epoch: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The conditions whose runs of the same seed have to come first."""
        return tuple(dict.fromkeys(name for name in (self.init_from, self.clusters_of, self.teacher) if name))

    @property
    def score(self) -> str:
        """The number by which it is compared: RSUM in a source that it never saw, if there is one."""
        if self.kind == "contexts":
            return "plain"
        return "seen" if self.trained == "four" else "unseen"

    def run_epochs(self, choices: Choices) -> int:
        """How many epochs it is trained for."""
        epochs = int(choices[self.epochs]) if isinstance(self.epochs, str) else self.epochs
        return max(1, round(epochs * self.share))

    def run_flags(self, choices: Choices) -> list[str]:
        """Its flags, with the choices in their places."""
        flags = [choices[flag[1:-1]] if flag.startswith("{") else flag for flag in self.flags]
        return ["--sort-text", *flags] if self.sort_text else flags


def _batch(micro_batch: int, steps: int, *more: str) -> tuple[str, ...]:
    """An effective batch of `micro_batch * steps` on one rank, logged about every 640 samples."""
    every = max(1, 640 // (micro_batch * steps))
    flags = ("--batch-size", str(micro_batch), "--dga-steps", str(steps), "--log-every-n-steps", str(every))
    return (*flags, *more)


_TWO_RANKS = ("--batch-size", "32", "--dga-steps", "1")
_SMALL_VIT = ("--model", "zerovl-emoji-vit")
_VIT = (*_SMALL_VIT, "--coin-flip-mixup")
_AUGMENTED = ("--aug-cfg", "scale=(0.6,1.0)", "--text-augment", "0.2")
_MIXUP = (*_AUGMENTED, "--coin-flip-mixup")
_SPLIT_64 = _batch(8, 8, "--dga-retain", "0")  # nothing is retained: all is forwarded twice, as in the paper


def _weighted(weight: str) -> tuple[str, ...]:
    return ("--cross-source-weight", weight)


def _last(source: str) -> Condition:
    """Sequential sampling that ends each epoch with a source (A.4)."""
    others = [name for name in ("noto", "twemoji", "openmoji", "fluent") if name != source]
    order = "::".join([*others, source])
    return Condition(f"sequential, {source} last", "sequential", ("--source-order", order), trained="four", share=0.5)


def _clustered(label: str, sampling: str, **more) -> Condition:
    """An arm of A.6: all start from the same model."""
    return Condition(label, sampling, init_from="one-start" if more.get("trained") == "one" else "start", **more)


# A source is drawn for each step, as in the paper's released code: the exact draw refuses clusters smaller than a batch.
_IID = ("--debiased-draw", "iid")

CONDITIONS: dict[str, Condition] = {
    "random": Condition("random", "random"),
    "debiased": Condition("debiased"),
    "share-0.5": Condition("half of the steps debiased", flags=("--debiased-share", "0.5")),
    "random-short": Condition("random, a quarter as long", "random", share=0.25),
    "debiased-short": Condition("debiased, a quarter as long", share=0.25),
    "weight-0": Condition("random, W = 0", "random", _weighted("0")),
    "weight-0.05": Condition("random, W = 0.05", "random", _weighted("0.05")),
    "weight-0.3": Condition("random, W = 0.3", "random", _weighted("0.3")),
    "icons-random": Condition("icons, random", "random", miniature="icons", epochs="icon-epochs"),
    "icons-debiased": Condition("icons, debiased", miniature="icons", epochs="icon-epochs"),
    "icons-share-0.5": Condition(
        "icons, half of the steps debiased", flags=("--debiased-share", "0.5"), miniature="icons", epochs="icon-epochs"
    ),
    "icons-weight-0": Condition("icons, W = 0", "random", _weighted("0"), "icons", epochs="icon-epochs"),
    "icons-weight-0.05": Condition("icons, W = 0.05", "random", _weighted("0.05"), "icons", epochs="icon-epochs"),
    "icons-weight-0.3": Condition("icons, W = 0.3", "random", _weighted("0.3"), "icons", epochs="icon-epochs"),
    "random-augmented": Condition("random, augmented", "random", _AUGMENTED, epochs="mixup-epochs"),
    "augmented": Condition("debiased, augmented", flags=_AUGMENTED, epochs="mixup-epochs"),
    "mixup": Condition("with mixup", flags=_MIXUP, epochs="mixup-epochs"),
    "detached-gather": Condition("gather without gradient", flags=(*_TWO_RANKS, "--ablate", "detached-gather"), ranks=2),
    "gather": Condition("gather with gradient", flags=_TWO_RANKS, ranks=2),
    "batch-16": Condition("batch 16", flags=_batch(16, 1, "--lr", "{lr-16}")),
    "batch-64": Condition("batch 64", flags=_batch(64, 1)),
    "random-256": Condition("random, batch 256", "random", _batch(256, 1, "--lr", "{lr-256}")),
    "batch-256": Condition("batch 256", flags=_batch(256, 1, "--lr", "{lr-256}")),
    "steps-16": Condition("batch 16, steps of 64", flags=_batch(16, 1, "--lr", "{lr-16}"), share=0.25),
    "steps-256": Condition("batch 256, steps of 64", flags=_batch(256, 1, "--lr", "{lr-256}"), share=4),
    "dga-256": Condition("batch 256, DGA 8 x 32", flags=_batch(32, 8, "--lr", "{lr-256}")),
    "replay": Condition("batch 64 as 8 x 8", flags=_SPLIT_64),
    "no-replay": Condition("the same, other masks", flags=(*_SPLIT_64, "--ablate", "no-replay")),
    "vit": Condition("ViT, trained whole", flags=_VIT, every_epoch=True),
    "token-drop": Condition("ViT, TokenDrop 0.25", flags=(*_VIT, "--token-drop", "0.25")),
    "mixed-bert": Condition("the BERT's own run", flags=("--coin-flip-mixup",)),
    "auxiliary": Condition(
        "ViT beside a frozen BERT", flags=(*_VIT, "--freeze", "text"), init_from="mixed-bert", every_epoch=True
    ),
    "four-random": Condition("four sources, random", "random", trained="four", share=0.5),
    "four-debiased": Condition("four sources, debiased", trained="four", share=0.5),
    "last-noto": _last("noto"),
    "last-twemoji": _last("twemoji"),
    "last-openmoji": _last("openmoji"),
    "last-fluent": _last("fluent"),
    "contexts-random": Condition("two contexts, random", "random", kind="contexts", trained="one", share=4),
    "contexts-debiased": Condition("two contexts, debiased", kind="contexts", trained="one", share=4),
    "start": Condition("the model that A.6 starts from", "random", epochs=START_EPOCHS),
    "go-on-random": _clustered("goes on, random", "random"),
    "clusters": _clustered("goes on, clusters", "debiased", flags=_IID, kind="clusters", clusters_of="start"),
    "go-on-sources": _clustered("goes on, true sources", "debiased", flags=_IID),
    "one-start": Condition("the model that one source starts from", "random", trained="one", epochs=START_EPOCHS, share=3),
    "one-random": _clustered("one source, random", "random", trained="one", share=3),
    "one-clusters": _clustered(
        "one source, clusters", "debiased", flags=_IID, kind="clusters", trained="one", share=3, clusters_of="one-start"
    ),
    "student": Condition("small ViT, no teacher", flags=_SMALL_VIT),
    "student-half": Condition("half distilled", flags=(*_SMALL_VIT, "--distill-weight", "0.5"), teacher="mixup"),
    "student-all": Condition("distilled", flags=(*_SMALL_VIT, "--distill-weight", "1"), teacher="mixup"),
    "repeated": Condition("repeated captions", kind="groups"),
    "repeated-positives": Condition(
        "repeated captions share the target", flags=("--positives", "caption"), kind="groups"
    ),
    "mixup-both": Condition(
        "mixup of both modalities", flags=(*_MIXUP, "--mixup-of", "both"), epochs="mixup-epochs", sort_text=False
    ),
    "mixup-embeddings": Condition(
        "mixup of word embeddings", flags=(*_MIXUP, "--mixup-text", "embeddings"), epochs="mixup-epochs"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A row of the paper that compares two of its runs, and the two conditions here that repeat them.

    Attributes:
        run, against: conditions.
        claim: whether the paper's number of `run` is higher or lower than that of `against`, the same, or different.
        what: the sentence's subject.
        measure: "score"; or "reach": the logarithm of the cost at which `run` reaches the final score of `against`, over the
            cost of `against` (Table 8).
        paper: (COCO, Flickr30K) RSUM of `run` and of `against`, or GPU hours of each; None where the paper draws bars, or has
            no such row.
        headline: a few words, where the page's first lines have it.
    """

    run: str
    against: str
    claim: Claim
    what: str
    measure: Literal["score", "reach"] = "score"
    paper: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    headline: str = ""

    @property
    def margin(self) -> float:
        return MARGIN_RSUM if self.measure == "score" else MARGIN_RATIO


@dataclass(frozen=True)
class PaperTable:
    """A table or section of the paper, or a question that it does not ask, and its comparisons.

    Attributes:
        of_paper: whether the paper makes these claims; a verdict on others does not speak of reproducing.
    """

    name: str
    title: str
    setting: str
    comparisons: tuple[Comparison, ...]
    of_paper: bool = True

    @property
    def conditions(self) -> list[str]:
        """The compared conditions, in the order of CONDITIONS."""
        named = {name for one in self.comparisons for name in (one.run, one.against)}
        return [name for name in CONDITIONS if name in named]


TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        "Table 3",
        "Debiased sampling",
        "Three sources, effective batch 64. The paper: 14 M pairs of four sources, batch 1,024, gather without gradient. On "
        "the emoji the sources draw the same concepts; on the icons they share few, and one is six times as large as another.",
        (
            Comparison(
                "debiased",
                "random",
                "higher",
                "Debiased sampling",
                paper=((392.3, 510.1), (371.6, 483.3)),
                headline="on the emoji",
            ),
            Comparison(
                "icons-debiased",
                "icons-random",
                "higher",
                "Debiased sampling",
                paper=((392.3, 510.1), (371.6, 483.3)),
                headline="on the icons",
            ),
        ),
    ),
    PaperTable(
        "When it helps",
        "Debiased sampling, by length of training and batch",
        "Not in the paper. The emoji; a quarter as long, and as long as validation rises with crops and masked words; at batch "
        "256, of which a source has 5 or 6 in an epoch, at the learning rate that was chosen for debiased sampling.",
        (
            Comparison(
                "debiased-short",
                "random-short",
                "higher",
                "Debiased sampling, short",
                headline="trained a quarter as long",
            ),
            Comparison(
                "augmented", "random-augmented", "higher", "Debiased sampling, long", headline="trained long, augmented"
            ),
            Comparison("batch-256", "random-256", "higher", "Debiased sampling, batch 256", headline="at batch 256"),
            Comparison("share-0.5", "debiased", "higher", "Every second step random"),
            Comparison("share-0.5", "random", "higher", "Every second step debiased"),
            Comparison("icons-share-0.5", "icons-debiased", "higher", "Every second step random"),
            Comparison("icons-share-0.5", "icons-random", "higher", "Every second step debiased"),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Negatives of other sources",
        "`--cross-source-weight` beside debiased sampling",
        "Not in the paper. Batches are random; negatives of another source count with weight W.",
        (
            Comparison("weight-0", "debiased", "higher", "W = 0", headline="weight 0 over debiased sampling, emoji"),
            Comparison("weight-0.05", "debiased", "higher", "W = 0.05"),
            Comparison("weight-0.3", "debiased", "higher", "W = 0.3"),
            Comparison("icons-weight-0", "icons-debiased", "higher", "W = 0", headline="the same, icons"),
            Comparison("icons-weight-0.05", "icons-debiased", "higher", "W = 0.05"),
            Comparison("icons-weight-0.3", "icons-debiased", "higher", "W = 0.3"),
            Comparison(
                "weight-0.05",
                "random",
                "higher",
                "W = 0.05",
                headline="`--cross-source-weight 0.05` over random, emoji",
            ),
            Comparison("icons-weight-0.05", "icons-random", "higher", "W = 0.05", headline="the same, icons"),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Table 3, mixup",
        "Coin-flip mixup",
        "Both arms have crops of 0.6 to 1 and masked words, and as many epochs as validation takes to stop rising: mixup is a "
        "regulariser, which shows where a run is long.",
        (
            Comparison(
                "mixup",
                "augmented",
                "higher",
                "Coin-flip mixup",
                paper=((402.8, 519.2), (392.3, 510.1)),
                headline="coin-flip mixup",
            ),
            Comparison("mixup", "mixup-both", "higher", "A coin rather than both modalities (3.2)"),
            Comparison("mixup", "mixup-embeddings", "higher", "Text features rather than word embeddings (3.2)"),
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
                headline="gradient through the gather",
            ),
        ),
    ),
    PaperTable(
        "Batch size",
        "Figure 1, Table 5: larger batches",
        "The learning rate of each batch size is chosen on validation; warm-up is a share of the run. Equal epochs, and equal "
        "steps (batch 16 has a quarter of the epochs of batch 64, batch 256 four times as many).",
        (
            Comparison("batch-64", "batch-16", "higher", "Batch 64 (equal epochs)"),
            Comparison(
                "batch-256",
                "batch-64",
                "higher",
                "Batch 256 (equal epochs)",
                paper=((424.4, 531.8), (415.0, 524.1)),
                headline="batch 256 over 64, equal epochs",
            ),
            Comparison("batch-64", "steps-16", "higher", "Batch 64 (equal steps)"),
            Comparison("steps-256", "batch-64", "higher", "Batch 256 (equal steps)", headline="the same, equal steps"),
        ),
    ),
    PaperTable(
        "Table 5",
        "DGA against a true large batch",
        "The gradient is the same, but dropout masks are drawn per micro-batch, so that two runs differ like two seeds.",
        (
            Comparison("debiased", "batch-64", "same", "DGA 2 x 32", paper=((424.1, 532.2), (424.4, 531.8))),
            Comparison("dga-256", "batch-256", "same", "DGA 8 x 32", paper=((425.2, 535.9), (425.0, 536.2))),
        ),
    ),
    PaperTable(
        "Table 6",
        "DGA with and without replayed randomness",
        "Batch 64 as 8 x 8, all forwarded twice; the text tower has dropout 0.1. The paper: 16 DGA steps.",
        (
            Comparison(
                "replay",
                "no-replay",
                "higher",
                "Replaying the masks",
                paper=((425.2, 535.9), (413.4, 527.1)),
                headline="replayed masks",
            ),
        ),
    ),
    PaperTable(
        "Table 7",
        "TokenDrop",
        "`zerovl-emoji-vit`, whose 16 patch tokens become 12, with debiased sampling and mixup. The paper: ViT-B/16, 196 "
        "tokens become 147. Its time is compared in docs/performance.md, at a size where computation dominates.",
        (
            Comparison(
                "token-drop", "vit", "same", "TokenDrop", paper=((424.8, 535.5), (425.2, 535.9)), headline="TokenDrop"
            ),
        ),
    ),
    PaperTable(
        "Table 8",
        "Auxiliary encoder",
        "The image tower of `zerovl-emoji-vit`, trained against the frozen text tower of another run, and with a text tower "
        "that is trained too. Cost: the epochs until the final score of the whole run is reached, times CPU seconds an epoch. "
        "The paper: ViT-B/32 with the BERT of the ViT-B/16 run.",
        (
            Comparison(
                "auxiliary",
                "vit",
                "same",
                "A frozen text tower",
                paper=((381.2, 493.9), (379.5, 494.1)),
                headline="a frozen text tower",
            ),
            Comparison("auxiliary", "vit", "lower", "The cost of the same score", "reach", ((110.0,), (240.0,))),
        ),
    ),
    PaperTable(
        "A.4",
        "Sequential sampling",
        "All four sources are trained on, each batch from one, one source after the other in each epoch, half as long as the "
        "other rows; scored within and across them. The paper shows bars without numbers.",
        (
            *(
                Comparison("four-debiased", f"last-{source}", "higher", f"Debiased sampling, {source} last,")
                for source in ("noto", "twemoji", "openmoji", "fluent")
            ),
            Comparison("last-fluent", "four-random", "higher", "Sequential sampling, fluent last,"),
            Comparison("last-noto", "four-random", "higher", "Sequential sampling, noto last,"),
            Comparison("last-noto", "last-fluent", "different", "The order of the sources"),
        ),
    ),
    PaperTable(
        "A.5",
        "Context bias",
        "Twemoji only, in two halves: the longer captions have a red frame around the picture, the shorter ones none. Scored "
        "on held-out pictures without frame. The paper: CC3M.",
        (
            Comparison(
                "contexts-debiased",
                "contexts-random",
                "higher",
                "Debiased sampling over the two contexts",
                paper=((239.5, 367.5), (211.8, 328.0)),
                headline="two contexts in one source (A.5)",
            ),
        ),
    ),
    PaperTable(
        "A.6",
        "Clusters as sources",
        f"All arms start from a model of {START_EPOCHS} epochs of random sampling, whose features also make the clusters; "
        "three sources as one, and one source alone. A cluster is drawn for each step in proportion to its size. The paper: "
        "100 clusters.",
        (
            Comparison(
                "clusters",
                "go-on-random",
                "higher",
                "Clusters",
                paper=((384.4, 511.1), (370.8, 502.5)),
                headline="clusters as sources (A.6)",
            ),
            Comparison("go-on-sources", "go-on-random", "higher", "The true sources"),
            Comparison(
                "one-clusters",
                "one-random",
                "higher",
                "Clusters of one source",
                paper=((384.4, 511.1), (370.8, 502.5)),
                headline="clusters of one source (A.6)",
            ),
        ),
    ),
    PaperTable(
        "Teachers",
        "`--teacher`: a small student beside the long run's model",
        "Not in the paper. The student is `zerovl-emoji-vit`; the teacher is the ConvNeXt of *with mixup*, trained longer on "
        "the same three sources. Temperature 0.01, one view, no augmentation.",
        (
            Comparison(
                "student-half", "student", "higher", "Distillation with weight 0.5", headline="a teacher (weight 0.5)"
            ),
            Comparison("student-all", "student", "higher", "Distillation alone", headline="a teacher (weight 1)"),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Repeated captions",
        "`--positives caption`",
        "Not in the paper. Every second pair has the name of its group as caption, one of about ten; scored with pairs' own "
        "captions, in the unseen source.",
        (
            Comparison(
                "repeated-positives",
                "repeated",
                "higher",
                "Sharing the target among equal captions",
                headline="shared targets for repeated captions",
            ),
        ),
        of_paper=False,
    ),
)

#: The page's first lines: a title, and the tables whose headlines it has.
TAKEAWAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Debiased sampling over random", ("Table 3", "When it helps")),
    ("Other ways to the same end", ("Negatives of other sources", "A.5", "A.6")),
    ("Large batches", ("Table 4", "Batch size", "Table 6")),
    ("Cheaper towers", ("Table 7", "Table 8")),
    ("More from the same pairs", ("Table 3, mixup", "Teachers", "Repeated captions")),
)
