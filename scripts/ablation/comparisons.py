"""Which tables of the paper are repeated: two conditions each, the paper's numbers for both, and the paper's claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.ablation.conditions import CONDITIONS, START_EPOCHS
from scripts.ablation.protocol import MARGIN_RATIO, MARGIN_RSUM
from scripts.ablation.verdicts import Claim


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
        headline: a few words, for the page's first lines; "" leaves it out of them.
        added: after which results it was added, if after any.
        guess: a likely reason, written once the row had come out against its claim.
    """

    run: str
    against: str
    claim: Claim
    what: str
    measure: Literal["score", "reach"] = "score"
    paper: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    headline: str = ""
    added: str = ""
    guess: str = ""

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


_SIX_SEEDS = "after six seeds of W = 0, 0.05 and 0.3"

TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        "Table 3",
        "Debiased sampling",
        "Three sources, effective batch 64. The paper: 14 M pairs of four sources, batch 1,024, mixup in neither arm, gather "
        "without gradient (here with). On the emoji the sources draw the same concepts; on the icons they share few, and one "
        "is up to six times as large as another.",
        (
            Comparison(
                "debiased",
                "random",
                "higher",
                "Debiased sampling",
                paper=((392.3, 510.1), (371.6, 483.3)),
                headline="debiased sampling over random, emoji",
            ),
            Comparison(
                "icons-debiased",
                "icons-random",
                "higher",
                "Debiased sampling",
                paper=((392.3, 510.1), (371.6, 483.3)),
                headline="debiased sampling over random, icons",
            ),
        ),
    ),
    PaperTable(
        "When it helps",
        "Debiased sampling, by length of training and batch",
        "Not in the paper. The emoji; a quarter as long, and as long as validation rises with debiased sampling (with and "
        "without mixup); at batch 256, of which a source has 4 or 5 in an epoch, at the learning rate that was chosen for "
        "debiased sampling: at equal epochs, 224 steps against 256 (a quarter of batch 64's), and at about equal steps, 1,022 "
        "against 1,024.",
        (
            Comparison(
                "debiased-short",
                "random-short",
                "higher",
                "Debiased sampling, short",
                headline="debiased sampling over random, a quarter as long",
            ),
            Comparison(
                "long-debiased",
                "long-random",
                "higher",
                "Debiased sampling, long",
                headline="debiased sampling over random, long",
            ),
            Comparison(
                "batch-256",
                "random-256",
                "higher",
                "Debiased sampling, batch 256, equal epochs",
                headline="debiased sampling over random, batch 256",
            ),
            Comparison(
                "steps-256",
                "random-steps-256",
                "higher",
                "Debiased sampling, batch 256, equal steps",
                headline="debiased sampling over random, batch 256, four times as long",
                added="after batch 256 at equal epochs",
            ),
            Comparison("share-0.5", "debiased", "higher", "Half of the steps random"),
            Comparison("share-0.5", "random", "higher", "Half of the steps debiased"),
            Comparison("icons-share-0.5", "icons-debiased", "higher", "Half of the steps random"),
            Comparison("icons-share-0.5", "icons-random", "higher", "Half of the steps debiased"),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Negatives of other sources",
        "`--cross-source-weight` beside debiased sampling",
        "Not in the paper. Batches are random; negatives of another source count with weight W. A W that is learned with the "
        "same loss becomes 0: each negative that counts less lowers the loss. In a random batch of 64 a sample has about 21 "
        "negatives of its own source, in a debiased one 63, in a random one of 192 about 64, in a third of the steps and at "
        "another learning rate.",
        (
            Comparison(
                "weight-0",
                "debiased",
                "higher",
                "W = 0",
                headline="`--cross-source-weight 0` over debiased sampling, emoji",
            ),
            Comparison(
                "weight-0.05", "debiased", "higher", "W = 0.05", headline="weight 0.05 over debiased sampling, emoji"
            ),
            Comparison("weight-0.3", "debiased", "higher", "W = 0.3"),
            Comparison(
                "icons-weight-0", "icons-debiased", "higher", "W = 0", headline="weight 0 over debiased sampling, icons"
            ),
            Comparison(
                "icons-weight-0.05",
                "icons-debiased",
                "higher",
                "W = 0.05",
                headline="weight 0.05 over debiased sampling, icons",
            ),
            Comparison("icons-weight-0.3", "icons-debiased", "higher", "W = 0.3"),
            Comparison(
                "weight-0.05",
                "random",
                "higher",
                "W = 0.05",
                headline="weight 0.05 over random, emoji",
            ),
            Comparison(
                "icons-weight-0.05", "icons-random", "higher", "W = 0.05", headline="weight 0.05 over random, icons"
            ),
            Comparison("weight-0", "random", "higher", "W = 0", added=_SIX_SEEDS),
            Comparison("weight-0.02", "random", "higher", "W = 0.02", added=_SIX_SEEDS),
            Comparison("weight-0.1", "random", "higher", "W = 0.1", added=_SIX_SEEDS),
            Comparison("weight-0.3", "random", "higher", "W = 0.3", added=_SIX_SEEDS),
            Comparison("icons-weight-0", "icons-random", "higher", "W = 0", added=_SIX_SEEDS),
            Comparison("icons-weight-0.02", "icons-random", "higher", "W = 0.02", added=_SIX_SEEDS),
            Comparison("icons-weight-0.1", "icons-random", "higher", "W = 0.1", added=_SIX_SEEDS),
            Comparison("icons-weight-0.3", "icons-random", "higher", "W = 0.3", added=_SIX_SEEDS),
            Comparison(
                "weight-0-192", "debiased", "higher", "W = 0, batch 192, batch 256's learning rate", added=_SIX_SEEDS
            ),
            Comparison(
                "go-on-weight",
                "go-on-random",
                "higher",
                f"W = 0.05 from a finished model of {START_EPOCHS} epochs on",
                added=_SIX_SEEDS,
            ),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Table 3, mixup",
        "Coin-flip mixup",
        "Both arms are trained for as many epochs as validation takes to stop rising: mixup is a regulariser, which shows "
        "where a run is long. At 16 epochs too, with the runs of Table 8's text tower. The paper: batch 1,024, gather without "
        "gradient (here with).",
        (
            Comparison(
                "mixup",
                "long-debiased",
                "higher",
                "Coin-flip mixup",
                paper=((402.8, 519.2), (392.3, 510.1)),
                headline="coin-flip mixup, 40 epochs",
            ),
            Comparison(
                "mixed-bert",
                "debiased",
                "higher",
                "Coin-flip mixup, 16 epochs",
                headline="coin-flip mixup, 16 epochs",
                added="after its runs, made for Table 8, were seen",
            ),
            Comparison("mixup", "mixup-both", "higher", "A coin rather than both modalities (3.2)"),
            Comparison("mixup", "mixup-embeddings", "higher", "Text features rather than word embeddings (3.2)"),
        ),
    ),
    PaperTable(
        "Table 4",
        "Gradient-reserved gather",
        "Two processes of 32 pairs each (torchrun, gloo), no DGA, no mixup. The paper: 8 GPUs of 128, with mixup. Each arm "
        "has the learning rate that was best on validation of those tried (last section), 1e-3 for both; they were tried "
        "after five seeds at 1e-3 had been seen; the arm with gradient was tried in one process of 64. At batch 256 (two of "
        "128) both have the rate that was chosen for batch 256 in one process.",
        (
            Comparison(
                "gather",
                "detached-gather",
                "higher",
                "Keeping the gradient of gathered features",
                paper=((415.0, 524.1), (402.8, 519.2)),
                headline="keeping the gather's gradient (Table 4)",
                guess="probably not the learning rate: on validation the gradient was not ahead at any one tried (two seeds; "
                "last section). Its training loss falls more slowly, too (mean over the last eighth of the runs: 2.56 "
                "against 2.48). Without it a picture learns from its own softmax over the texts, and not from the "
                "texts' softmaxes over the pictures; with 64 pairs that part may be mostly noise.",
            ),
            Comparison(
                "gather-256",
                "detached-256",
                "higher",
                "Keeping the gradient, batch 256",
                headline="keeping the gather's gradient, batch 256",
                added="after the row at batch 64",
            ),
        ),
    ),
    PaperTable(
        "Batch size",
        "Figure 1, Table 5: larger batches",
        "Each batch has the learning rate that was best on validation of those tried (last section). Warm-up is a share of the "
        "run. Equal epochs (at 256 an epoch has an eighth fewer samples, since each source leaves out what does not fill a "
        "batch), and equal steps, where the larger batch sees four times the samples. The paper's numbers: batch 8,192 against "
        "1,024, equal epochs.",
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
            Comparison(
                "steps-256",
                "batch-64",
                "higher",
                "Batch 256 (equal steps)",
                headline="batch 256 over 64, equal steps and so four times the samples",
            ),
        ),
    ),
    PaperTable(
        "Table 5",
        "DGA against a true large batch",
        "The gradient is the same, but dropout masks are drawn per micro-batch, so that two runs differ like two seeds.",
        (
            Comparison(
                "debiased",
                "batch-64",
                "same",
                "DGA 2 x 32",
                paper=((424.1, 532.2), (424.4, 531.8)),
                headline="DGA 2 x 32 over a true batch of 64 (Table 5)",
            ),
            Comparison(
                "dga-256",
                "batch-256",
                "same",
                "DGA 8 x 32",
                paper=((425.2, 535.9), (425.0, 536.2)),
                headline="DGA 8 x 32 over a true batch of 256 (Table 5)",
            ),
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
                headline="replayed masks (Table 6)",
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
        "that is trained too. Cost: the epochs until the final score of the whole run is first reached, by either, times CPU "
        "seconds an epoch; the text tower's own run is not counted. The tower comes with the temperature it was trained to. "
        "The paper: ViT-B/32 with the BERT of the ViT-B/16 run.",
        (
            Comparison(
                "auxiliary",
                "vit",
                "same",
                "A frozen text tower",
                paper=((381.2, 493.9), (379.5, 494.1)),
                headline="a frozen text tower (Table 8)",
            ),
            Comparison("auxiliary", "vit", "lower", "The cost of the same score", "reach", ((110.0,), (240.0,))),
        ),
    ),
    PaperTable(
        "A.4",
        "Sequential sampling",
        "All four sources are trained on, each batch from one, one source after the other in each epoch, half as many "
        "epochs as the other rows (45,000 samples); scored within and across them. The paper shows bars without numbers.",
        (
            *(
                Comparison(
                    "four-debiased",
                    f"last-{source}",
                    "higher",
                    "Debiased rather than sequential sampling",
                    headline=f"debiased over sequential sampling that ends with {source} (A.4)",
                )
                for source in ("noto", "twemoji", "openmoji", "fluent")
            ),
            Comparison("last-fluent", "four-random", "higher", "Sequential sampling"),
            Comparison("last-noto", "four-random", "higher", "Sequential sampling"),
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
        f"All arms start from a model of {START_EPOCHS} epochs of random sampling (one source: {3 * START_EPOCHS}), whose "
        "features also make the clusters; three sources as one, and one source alone. A cluster or source is drawn for each "
        "step in proportion to its size; random sampling shows each sample once an epoch. The paper: 100 clusters.",
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
        "Temperature",
        "`--ablate temperature-parameter`",
        "Not in the paper; its released code trains the temperature itself, open_clip its logit scale. The rate is 1e-3, ten "
        "times the paper's, so that a step moves the temperature by up to 5 %.",
        (
            Comparison(
                "temperature",
                "debiased",
                "higher",
                "The temperature as parameter",
                headline="the temperature as parameter over the logit scale",
            ),
        ),
        of_paper=False,
    ),
    PaperTable(
        "Teachers",
        "`--teacher`: a small student beside the long run's model",
        "Not in the paper. The student is `zerovl-emoji-vit`; the teacher is the ConvNeXt of *with mixup, long* on "
        "the same three sources. Temperature 0.01. The arms with a teacher see four fixed crops of each picture, the arm "
        "without it a new one each epoch.",
        (
            Comparison(
                "student-half",
                "student",
                "higher",
                "Distillation with weight 0.5",
                headline="half distilled over no teacher",
            ),
            Comparison("student-all", "student", "higher", "Distillation alone", headline="distilled over no teacher"),
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
