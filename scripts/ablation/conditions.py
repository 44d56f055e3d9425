"""What `make ablation` trains.

A condition is a run of the training program with the demo's flags (`emoji.runs.drawn_flags`: effective batch 64 as two micro-
batches of 32), crops and masked words as in the paper (`AUGMENTED`), and the flags that it names. `comparisons.py` says which
tables of the paper they repeat, `protocol.py` how runs are scored and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.ablation.protocol import Choices

#: Of every run (A.9, section 2.2). In pilots without it, 16 epochs more on top of 8 lowered the score in the unseen source.
AUGMENTED = ("--aug-cfg", "scale=(0.6,1.0)", "--text-augment", "0.2")
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

    @property
    def choices(self) -> set[str]:
        """The choices, and fixed settings, that its runs and those that it needs depend on."""
        named = {flag[1:-1] for flag in self.flags if flag.startswith("{")}
        if isinstance(self.epochs, str):
            named.add(self.epochs)
        if self.clusters_of is not None:
            named.add("clusters")
        return named.union(*(CONDITIONS[name].choices for name in self.needs))

    def run_epochs(self, choices: Choices) -> int:
        """How many epochs it is trained for."""
        epochs = int(choices[self.epochs]) if isinstance(self.epochs, str) else self.epochs
        return max(1, round(epochs * self.share))

    def run_flags(self, choices: Choices) -> list[str]:
        """Its flags, with the choices in their places."""
        flags = [choices[flag[1:-1]] if flag.startswith("{") else flag for flag in self.flags]
        return [*AUGMENTED, *(["--sort-text"] if self.sort_text else []), *flags]


def _batch(micro_batch: int, steps: int, *more: str) -> tuple[str, ...]:
    """A batch of `micro_batch * steps` on each rank, logged about every 640 of its samples."""
    every = max(1, 640 // (micro_batch * steps))
    flags = ("--batch-size", str(micro_batch), "--dga-steps", str(steps), "--log-every-n-steps", str(every))
    return (*flags, *more)


_TWO_RANKS = ("--batch-size", "32", "--dga-steps", "1")
_SMALL_VIT = ("--model", "zerovl-emoji-vit")
_VIT = (*_SMALL_VIT, "--coin-flip-mixup")
_MIXUP = ("--coin-flip-mixup",)
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
_IID = ("--ablate", "iid-draw")

CONDITIONS: dict[str, Condition] = {
    "random": Condition("random", "random"),
    "debiased": Condition("debiased"),
    "share-0.5": Condition("half of the steps debiased", flags=("--debiased-share", "0.5")),
    "random-short": Condition("random, a quarter as long", "random", share=0.25),
    "debiased-short": Condition("debiased, a quarter as long", share=0.25),
    "weight-0": Condition("random, W = 0", "random", _weighted("0")),
    "weight-0.05": Condition("random, W = 0.05", "random", _weighted("0.05")),
    "weight-0.02": Condition("random, W = 0.02", "random", _weighted("0.02")),
    "weight-0.1": Condition("random, W = 0.1", "random", _weighted("0.1")),
    "weight-0.3": Condition("random, W = 0.3", "random", _weighted("0.3")),
    "weight-0-192": Condition("random, W = 0, batch 192", "random", _batch(96, 2, "--lr", "{lr-256}", *_weighted("0"))),
    "icons-random": Condition("icons, random", "random", miniature="icons", epochs="icon-epochs"),
    "icons-debiased": Condition("icons, debiased", miniature="icons", epochs="icon-epochs"),
    "icons-share-0.5": Condition(
        "icons, half of the steps debiased", flags=("--debiased-share", "0.5"), miniature="icons", epochs="icon-epochs"
    ),
    "icons-weight-0": Condition("icons, W = 0", "random", _weighted("0"), "icons", epochs="icon-epochs"),
    "icons-weight-0.05": Condition("icons, W = 0.05", "random", _weighted("0.05"), "icons", epochs="icon-epochs"),
    "icons-weight-0.02": Condition("icons, W = 0.02", "random", _weighted("0.02"), "icons", epochs="icon-epochs"),
    "icons-weight-0.1": Condition("icons, W = 0.1", "random", _weighted("0.1"), "icons", epochs="icon-epochs"),
    "icons-weight-0.3": Condition("icons, W = 0.3", "random", _weighted("0.3"), "icons", epochs="icon-epochs"),
    "long-random": Condition("random, long", "random", epochs="long-epochs"),
    "long-debiased": Condition("debiased, long", epochs="long-epochs"),
    "mixup": Condition("with mixup, long", flags=_MIXUP, epochs="long-epochs"),
    "detached-gather": Condition(
        "gather without gradient", flags=(*_TWO_RANKS, "--lr", "{lr-detached}", "--ablate", "detached-gather"), ranks=2
    ),
    "gather": Condition("gather with gradient", flags=(*_TWO_RANKS, "--lr", "{lr-64}"), ranks=2),
    "detached-256": Condition(
        "gather without gradient, batch 256",
        flags=_batch(128, 1, "--lr", "{lr-256}", "--ablate", "detached-gather"),
        ranks=2,
    ),
    "gather-256": Condition("gather with gradient, batch 256", flags=_batch(128, 1, "--lr", "{lr-256}"), ranks=2),
    "batch-16": Condition("batch 16", flags=_batch(16, 1, "--lr", "{lr-16}")),
    "batch-64": Condition("batch 64", flags=_batch(64, 1, "--lr", "{lr-64}")),
    "random-256": Condition("random, batch 256", "random", _batch(256, 1, "--lr", "{lr-256}")),
    "batch-256": Condition("batch 256", flags=_batch(256, 1, "--lr", "{lr-256}")),
    "steps-16": Condition("batch 16, steps of 64", flags=_batch(16, 1, "--lr", "{lr-16}"), share=0.25),
    "steps-256": Condition("batch 256, steps of 64", flags=_batch(256, 1, "--lr", "{lr-256}"), share=4.57),
    "random-steps-256": Condition(
        "random, batch 256, steps of 64", "random", _batch(256, 1, "--lr", "{lr-256}"), share=4
    ),
    "dga-256": Condition("batch 256, DGA 8 x 32", flags=_batch(32, 8, "--lr", "{lr-256}")),
    "replay": Condition("batch 64 as 8 x 8", flags=_SPLIT_64),
    "no-replay": Condition("the same, other masks", flags=(*_SPLIT_64, "--ablate", "no-replay")),
    "vit": Condition("ViT, trained whole", flags=_VIT, every_epoch=True),
    "token-drop": Condition("ViT, TokenDrop 0.25", flags=(*_VIT, "--token-drop", "0.25")),
    "mixed-bert": Condition("with mixup, 16 epochs", flags=("--coin-flip-mixup",)),
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
    "temperature": Condition("the temperature as parameter", flags=("--ablate", "temperature-parameter")),
    "start": Condition("the model that A.6 starts from", "random", epochs=START_EPOCHS),
    "go-on-random": _clustered("goes on, random", "random"),
    "go-on-weight": _clustered("goes on, W = 0.05", "random", flags=_weighted("0.05")),
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
        "mixup of both modalities", flags=(*_MIXUP, "--ablate", "mixup-both"), epochs="long-epochs", sort_text=False
    ),
    "mixup-embeddings": Condition(
        "mixup of word embeddings", flags=(*_MIXUP, "--ablate", "mixup-embeddings"), epochs="long-epochs"
    ),
}  # fmt: skip
