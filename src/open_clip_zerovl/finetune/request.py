"""The request of a fine-tuning, and the inputs of its training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import digest_of, file_digests
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.evaluate.settings import CurveFlags
from open_clip_zerovl.finetune.data import CAPTIONS, DataArguments
from open_clip_zerovl.finetune.flags import FinetuneFlags
from open_clip_zerovl.finetune.split import Split
from open_clip_zerovl.models.configs import LOCAL_DIR
from open_clip_zerovl.recipe.flags import Settings

KEEP_SHARE = 0.2
SOURCE_WEIGHTS = "train-data-upsampling-factors"
# A later call on the same folder may have other values of these flags; the first decide the curve, which is then scored again.
# Every other flag decides the training, so that one that is added does too. --out is the folder itself.
OF_CURVE = ("kept", "zero_shot_data", "alphas", "rule", "kept_share")
DATA_OF_CURVE = ("--kept", "--zero-shot-data")
FREE = (
    "patience",  # the training goes on if it is not over (`Training.is_over`)
    "compare_pictures",  # a check, made as soon as it is asked for
    *(
        "device",
        "batch_size",
        "workers",
    ),  # where and how fast; the training has its own, in settings.json
)
_TEXTS = {".json", ".txt", ".model", ".jinja"}  # configs and tokenizers
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class FinetuneRequest(FinetuneFlags, CurveFlags):
    """The arguments of `zerovl finetune`.

    Attributes:
        start: the model to start from; its device also trains, and its batch size and workers are those of evaluations.
        data: pairs, see `data`.
        out: folder to write.
        given: training flags that replace the chosen values.
    """

    start: Encoder
    data: str
    out: Path
    given: Settings = field(default_factory=dict, kw_only=True)

    @property
    def share_kept(self) -> float:
        """Return the share of --keep-data in an epoch."""
        return KEEP_SHARE if self.keep_share is None else self.keep_share

    @property
    def captions(self) -> str | None:
        """Return --captions of the training, which decides the samples of an epoch."""
        return self.given.get("captions", CAPTIONS)

    def of_training(self) -> dict[str, Any]:
        """Name the arguments that decide the training, with None for a flag that is not given."""
        flags = [(self.start, each) for each in flags_of(Encoder)] + [
            (self, each) for each in flags_of(FinetuneRequest)
        ]
        flag_values = {
            each.option: None if getattr(values, each.name) is False else getattr(values, each.name)
            for values, each in flags
            if each.name not in OF_CURVE + FREE
        }
        return {
            "--from": self.start.model,
            "--data": self.data,
            **flag_values,
            "--keep-share": self.share_kept if self.keep_data else None,
            **{f"--set {flag}": value for flag, value in self.given.items()},
        }

    def arguments(
        self, earlier: Mapping[str, Any] | None = None, say: Say = lambda line: None
    ) -> DataArguments:
        """Gather all data arguments, with the names of sources and sets of an earlier call's request."""
        return DataArguments.of(
            self.data,
            self.retrieval_data,
            sources={"--keep-data": self.keep_data},
            retrieval={"--kept": self.kept},
            labelled={"--zero-shot-data": self.zero_shot_data},
            earlier=earlier,
            say=say,
        )

    def claimed(self, arguments: DataArguments) -> dict[str, Any]:
        """Name the arguments that decide the training, for the claim of the folder."""
        flags = [flag for flag in arguments.flags() if flag not in DATA_OF_CURVE]
        return {**self.of_training(), **arguments.entries(flags)}

    def of_curve(self, arguments: DataArguments) -> dict[str, Any]:
        """Name the arguments that decide the curve."""
        values = {
            each.option: getattr(self, each.name)
            for each in flags_of(FinetuneRequest)
            if each.name in OF_CURVE
        }
        return {**values, "--alphas": list(self.alphas), **arguments.entries(DATA_OF_CURVE)}


def digest_of_model(start: Encoder) -> str | None:
    """Digest a model: its config, and the content of the files with its weights and its tokenizer.

    Returns:
        None if there is no such model, it has no files of weights (a tag), or they are gone, of which OUT/before may hold the
        content.
    """
    try:
        config = start.spec().model_cfg
    except (UserError, OSError):
        return None
    place = Path(start.model.removeprefix(LOCAL_DIR)).expanduser()
    files = (
        [place, *(folder / "params.txt" for folder in list(place.parents)[:2])]
        if place.is_file()
        else []
    )
    files += _files(place, _TEXTS | _WEIGHTS)
    for key in ("hf_model_name", "hf_tokenizer_name"):
        files += _files(Path(config["text_cfg"].get(key) or place), _TEXTS)
    if not any(file.suffix in _WEIGHTS and file.is_file() for file in files):
        return None
    return digest_of(config, _named_digests(files))


def digest_of_encoder(name: str) -> str | None:
    """Digest the files of an encoder of `zerovl align`.

    Returns:
        None for one that is fetched by its name.
    """
    library, colon, place = name.partition(":")
    if not colon or library not in ("timm", "hf"):
        return digest_of_model(Encoder(name))
    *_, last = place.split(",")
    path = Path(last).expanduser()
    if path.is_file():
        return digest_of(name.removesuffix(f",{last}"), _named_digests([path]))
    files = _files(path, _TEXTS | _WEIGHTS, "**/*")
    return digest_of(library, _named_digests(files)) if files else None


def _named_digests(files: Iterable[Path]) -> list[tuple[str, str | None]]:
    digests = file_digests(file for file in {*files} if file.is_file())
    return sorted((Path(file).name, digest) for file, digest in digests.items())


def _files(folder: Path, suffixes: set[str], pattern: str = "*") -> list[Path]:
    """List a folder's files with these suffixes, without the curve that chose its weights."""
    return [
        file
        for file in folder.glob(pattern)
        if file.suffix in suffixes and file.name != "interpolation.json"
    ]


@dataclass(frozen=True)
class Prepared:
    """Inputs of the training.

    Attributes:
        arguments: all data arguments.
        before: the model as a folder.
        train_data: for `--train-data`.
        split: the held-out sets, and the pictures of both sides.
        sources: opened.
        notes: sentences for the report.
        factors: for `--train-data-upsampling-factors`: a weight for each source of old pairs.
    """

    arguments: DataArguments
    before: str
    train_data: str
    split: Split
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    factors: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Old pairs beside the new ones: new (weight 1) + old (weight w), share = w * old / (new + w * old)
# ---------------------------------------------------------------------------------------------------------------------


def check_keeping(request: FinetuneRequest) -> None:
    """Refuse --keep flags that contradict each other or training flags.

    Raises:
        UserError: they do.
    """
    if request.keep_share is not None and request.keep_data is None:
        raise UserError(
            f"--keep-share {request.keep_share:g} needs --keep-data NAME=SHARDS, the old pairs"
        )
    if request.keep_data is not None and not 0 < request.share_kept < 1:
        raise UserError(
            f"--keep-share {request.share_kept:g} must lie between 0 and 1; give 0.2, for example"
        )
    if request.keep_data is not None and SOURCE_WEIGHTS in request.given:
        raise UserError(
            f"--set {SOURCE_WEIGHTS} and --keep-share both decide the weights of the sources; give one of them"
        )


def with_old_pairs(
    request: FinetuneRequest, train_data: str, old_data: str | None
) -> tuple[tuple[Source, ...], str, str | None]:
    """Return (sources, `--train-data`, `--train-data-upsampling-factors`) of the new pairs and of --keep-data.

    The samples are those of the training: with --set captions=all each caption of a picture is one.

    Raises:
        UserError: old pairs that cannot be opened, or with the name of a new source.
    """
    new = parse_sources(train_data, captions=request.captions)
    if old_data is None:
        return new, train_data, None
    old = parse_sources(old_data, captions=request.captions)
    share = request.share_kept
    weight = (
        share
        / (1 - share)
        * sum(source.num_samples for source in new)
        / sum(source.num_samples for source in old)
    )
    factors = "::".join(f"{source.name}={weight!r}" for source in old)
    both = f"{train_data}::{old_data}"
    return parse_sources(both, factors, captions=request.captions), both, factors


def keeping_notes(
    request: FinetuneRequest, sources: Sequence[Source], factors: str | None
) -> list[str]:
    """Say how many old pairs there are and what they cost."""
    if factors is None:
        return []
    names = {part.partition("=")[0] for part in factors.split("::")}
    old = {
        source.name: source.num_samples * source.weight
        for source in sources
        if source.name in names
    }
    new = sum(source.num_samples for source in sources if source.name not in names)
    shown = ", ".join(f"{count:,.0f} of {name}" for name, count in old.items())
    return [
        f"An epoch has {new:,} new pairs and {request.share_kept:.0%} old ones ({shown}): "
        f"{1 + sum(old.values()) / new:.2f} times the samples."
    ]
