"""The `get_data` hook: the mixture instead of open_clip's shard pipeline, and retrieval sets besides its evaluation data.

The first part checks open_clip's own data before its main starts: mistakes that its pipeline would not name, or would hang on.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
from open_clip_train.data import expand_urls
from open_clip_train.distributed import all_gather_object, is_master, world_info_from_env
from open_clip_train.zero_shot import accuracy
from webdataset import autodecode

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.core.flags import conflicts
from open_clip_zerovl.data.images import normalize, split_normalize
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing, schedule_of
from open_clip_zerovl.data.sets import IndexedSet, open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.sampling.schedule import Batching, Sampling, Schedule, few_steps
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.pictures import forget_other_formats
from open_clip_zerovl.shards.urls import check_quotes, local_path

# ---------------------------------------------------------------------------------------------------------------------
# Checks of open_clip's own data
# ---------------------------------------------------------------------------------------------------------------------

# by webdataset's decoder, at the sight of such a member
UNPICKLED = ("pyd", "pickle", "pkl", "pth")


def check_stock_data(args: argparse.Namespace, *, training: bool) -> None:
    """Check the data of open_clip's own pipeline, whose own messages are unclear or come late.

    Args:
        args: open_clip's arguments.
        training: whether open_clip's pipeline, and not our mixture, reads `--train-data`.

    Raises:
        UserError: a missing shard, a folder.
    """
    named = {"--train-data": args.train_data if training else None, "--val-data": args.val_data}
    if any(named.values()) or args.imagenet_val or args.imagenet_v2:
        guard_decoders(args.workers)
        forget_other_formats()
    if args.imagenet_val or args.imagenet_v2:
        _check_accuracy()
    for flag, path in named.items() if not args.dataset_type.startswith("synthetic") else ():
        if path and (args.dataset_type == "webdataset" or path.endswith(".tar")):
            _check_shards(flag, path, args)
        elif path and flag == "--train-data" and os.path.isdir(path):
            # open_clip builds the model, then names an unknown extension.
            raise UserError(
                f"{flag} {path} is a folder; name it to read it as a source: --train-data NAME={path}"
            )


def _check_accuracy() -> None:
    """Refuse a numpy with which open_clip's accuracy fails: 3.3 makes floats of arrays with one element, which 2.4 refuses."""
    try:
        accuracy(torch.eye(2), torch.arange(2))
    except TypeError as error:
        raise UserError(
            f"--imagenet-val and --imagenet-v2 of this open_clip do not work with numpy {numpy.__version__} ({error}); "
            "pip install 'numpy<2.4', or evaluate the checkpoint with `zerovl linear-probe` or --retrieval-data"
        ) from error


def guard_decoders(workers: int) -> None:
    """Keep webdataset from running code in a shard: members that it would unpickle stay bytes, with one warning.

    open_clip's pipeline hands every member to webdataset's decoder, but uses the picture and the caption only, so training does
    not change.
    """
    for extension in autodecode.decoders.keys() & UNPICKLED:  # 0.2.86 leaves .pkl alone
        autodecode.decoders[extension] = partial(_left_unread, extension)
    if workers > 0 and (method := multiprocessing.get_start_method()) != "fork":
        logging.warning(
            f"Loader processes are started by {method!r} and unpickle members .{', .'.join(UNPICKLED)} of shards, which can "
            "run code; name the source (--train-data NAME=SHARDS), then pictures and captions only are read."
        )


_warned: set[str] = set()


def _left_unread(extension: str, data: bytes) -> bytes:
    if extension not in _warned:
        _warned.add(extension)
        logging.warning(
            f"A shard has .{extension} members, which webdataset would unpickle, so that they could run code. They are left "
            "unread; to read pictures and captions only, name the source: --train-data NAME=SHARDS."
        )
    return data


def _check_shards(flag: str, path: str, args: argparse.Namespace) -> None:
    """Refuse a missing shard, which makes open_clip's pipeline hang."""
    weights = (
        args.train_data_upsampling_factors
        if flag == "--train-data" and args.dataset_resampled
        else None
    )
    shards = list(expand_urls(path, weights)[0])
    for shard in shards:
        check_quotes(shard)
    missing = [
        shard
        for shard in shards
        if (file := local_path(shard)) is not None and not os.path.isfile(file)
    ]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(shards)} shards of {flag} do not exist, first {missing[0]}; correct the path or the range"
        )


if TYPE_CHECKING:
    from open_clip_zerovl.evaluate.zero_shot import LabelledSet
    from open_clip_zerovl.prepare.settings import Columns

# ---------------------------------------------------------------------------------------------------------------------
# The mixture and retrieval sets
# ---------------------------------------------------------------------------------------------------------------------

# open_clip's main calls evaluate() only if the data has one of its own keys; it does not read this one itself.
PLACEHOLDER_KEY = "val"


@dataclass
class TrainData:
    """`data["train"]` in the form that open_clip's main and loops expect.

    Attributes:
        normalize: for the loader's images on the device, if the loader gives bytes.
    """

    dataloader: Any
    normalize: Callable[[torch.Tensor], torch.Tensor] | None = None

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch, and the optimizer step of it, that the next iteration begins with: `MixtureLoader.set_epoch`."""
        self.dataloader.set_epoch(epoch, start_step)


@dataclass(frozen=True)
class TrainingInputs:
    """The data that the command line names, opened and checked before open_clip's main makes a run folder."""

    sources: tuple[Source, ...] = ()
    retrieval: dict[str, IndexedSet] = field(default_factory=dict)
    labelled: dict[str, LabelledSet] = field(default_factory=dict)


def batching_of(config: AllFlags, args: argparse.Namespace) -> Batching:
    """Divide the effective batch of a run.

    Before open_clip's main has the ranks they are the environment's.
    """
    ranks = getattr(args, "world_size", None) or world_info_from_env()[2]
    return Batching(args.batch_size, config.dga_steps, ranks, max(1, args.workers))


def with_positives(config: AllFlags, sources: Sequence[Source]) -> AllFlags:
    """Set `--positives caption` if none was given and a source has captions of classes.

    Pictures of a class would be each other's negatives. A flag that does not work with it wins, with a warning.
    """
    classes = [source.name for source in sources if source.classes]
    takes_ids = config.own_step and config.distill_model is None
    if config.positives is not None or not classes or not takes_ids:
        return replace(config, positives=None) if config.positives == "pair" else config
    finding = f"Pictures of a class share its captions (source {', '.join(classes)})"
    settled = replace(config, positives="caption")
    if against := next(conflicts(settled, ["positives"]), None):
        logging.warning(f"{finding} and count as negatives of each other: {against}.")
        return config
    logging.info(f"{finding}: --positives caption; give --positives pair for one positive each.")
    return settled


def open_inputs(config: AllFlags, args: argparse.Namespace) -> TrainingInputs:
    """Open sources and retrieval sets, and make sure that open_clip's own data exists and that an epoch has a step.

    Raises:
        UserError: data that cannot be used.
    """
    check_stock_data(args, training=config.sampling is None)
    sources: tuple[Source, ...] = ()
    if config.sampling is not None:
        from open_clip_zerovl.prepare.door import as_shards

        strict = config.on_bad_sample == "fail"
        sources = parse_sources(
            as_shards(args.train_data, _columns(args), strict=strict),
            args.train_data_upsampling_factors,
            captions=config.captions,
            on_bad_sample=config.on_bad_sample,
            cache=_shard_cache(config),
        )
        if config.sampling == "debiased" and len(sources) == 1:
            logging.warning(
                f"Debiased sampling has one source only, {sources[0].name}; name several sources."
            )
        batch = batching_of(config, args).effective_batch
        schedule_of(sources, batch, _sampling(config, args), seed=args.seed, epoch=0)
        if config.shard_cache is not None:
            check_writable(config.shard_cache, folder=True)
    retrieval: dict[str, IndexedSet] = {}
    if config.retrieval_data:
        from open_clip_zerovl.prepare.door import sets_as_shards

        paths = parse_retrieval_data(sets_as_shards(config.retrieval_data))
        retrieval = {name: open_retrieval_set(path) for name, path in paths.items()}
    _tell_trained_pictures(sources, retrieval)
    labelled = parse_retrieval_data(config.zero_shot_data) if config.zero_shot_data else {}
    sets: dict[str, LabelledSet] = {}
    if labelled:
        from open_clip_zerovl.evaluate.zero_shot import open_labelled_set

        sets = {name: open_labelled_set(str(place)) for name, place in labelled.items()}
    return TrainingInputs(sources, retrieval, sets)


def _tell_trained_pictures(sources: Sequence[Source], retrieval: Mapping[str, IndexedSet]) -> None:
    """Warn of retrieval sets that are read from the files that are trained on (`zerovl data near` compares pictures)."""
    for name, held_out in retrieval.items():
        for source in sources:
            if count := held_out.in_files(source.shards):
                logging.warning(
                    f"{count:,} of the {len(held_out):,} pictures of the retrieval set {name} lie in files that are trained on "
                    f"(source {source.name}): its scores measure memorisation; hold a part out with "
                    "`zerovl data pack --test-share 0.05`."
                )


def get_data(
    config: AllFlags,
    inputs: TrainingInputs,
    stock: Callable[[argparse.Namespace], dict],
    args: argparse.Namespace,
    transform: Callable[..., Any],
    tokenizer: Any,
) -> dict:
    """Open open_clip's data with our training data, and a key for `evaluate` where there are sets of ours.

    Args:
        stock: open_clip's own function for these arguments.
        transform: of training pictures.

    Raises:
        UserError: an epoch of zero optimizer steps (open_clip would train nothing, save a checkpoint and exit 0).
    """
    if config.sampling is None:
        data = stock(args)
    else:
        data = stock(argparse.Namespace(**{**vars(args), "train_data": None}))
        data["train"] = _mixture_data(config, inputs, args, transform, tokenizer)
    if "train" in data:
        loader = data["train"].dataloader
        micro_batches = loader.num_batches
        if config.sampling is None and config.dga_steps > 1:
            # open_clip's loops and schedules count optimizer steps
            loader.num_batches //= config.dga_steps
        if loader.num_batches // args.accum_freq == 0:
            raise UserError(
                f"an epoch has zero optimizer steps: {micro_batches} micro-batches of --batch-size {args.batch_size} on "
                f"{args.world_size} rank(s), with --dga-steps {config.dga_steps} and --accum-freq {args.accum_freq}; lower "
                "them, or give more --train-data"
            )
        _check_warmup(config, args, loader.num_batches // args.accum_freq * args.epochs)
    if inputs.retrieval or inputs.labelled:
        data.setdefault(PLACEHOLDER_KEY, None)
    return data


def _check_warmup(config: AllFlags, args: argparse.Namespace, steps: int) -> None:
    """Warn if the learning rate never reaches `--lr`."""
    if (
        config.warmup_share is None
        and not args.skip_scheduler
        and args.warmup > steps
        and is_master(args)
    ):
        logging.warning(
            f"--warmup {args.warmup} is longer than the run's {steps} steps: the learning rate ends at "
            f"{args.lr * steps / args.warmup:.2g} and never reaches --lr {args.lr:g}; give --warmup-share 0.025."
        )


def _mixture_data(
    config: AllFlags, inputs: TrainingInputs, args: argparse.Namespace, transform, tokenizer
) -> TrainData:
    assert config.sampling is not None
    sources, normalizer = inputs.sources, None
    own_step = config.own_step
    if own_step:  # whose `prepare` runs on the device; open_clip's loop wants normalised floats
        try:
            transform, mean, std = split_normalize(transform)
            normalizer = partial(normalize, mean=mean, std=std)
        except (
            UserError
        ) as reason:  # timm's transforms (--aug-cfg use_timm=True) have another order
            logging.info(f"Images travel to the device as floats: {reason}.")
    mixture = Mixture(
        sources,
        batching_of(config, args),
        Preprocessing(
            transform,
            tokenizer,
            augment_caption=WordAugment(tokenizer, config.text_augment)
            if config.text_augment is not None
            else None,
            with_origin=own_step,
            with_content=config.positives not in (None, "pair"),
        ),
        rank=args.rank,
        sampling=_sampling(config, args),
        seed=args.seed,
        on_bad_sample=config.on_bad_sample,
        cache=_shard_cache(config),
    )
    loader = MixtureLoader(
        mixture,
        workers=args.workers,
        pin_memory=args.device.startswith("cuda"),
        max_bad_share=config.max_bad_share,
        gather=partial(all_gather_object, args) if args.distributed else None,
    )
    if is_master(args):
        log_schedule(sources, mixture.schedule(0))
    return TrainData(loader, normalizer)


def _shard_cache(config: AllFlags) -> ShardCache:
    limit_bytes = int(config.shard_cache_gib * 2**30)
    if config.shard_cache is None:
        return ShardCache(limit_bytes=limit_bytes)
    return ShardCache(os.path.abspath(os.path.expanduser(config.shard_cache)), limit_bytes)


def _sampling(config: AllFlags, args: argparse.Namespace) -> Sampling:
    assert config.sampling is not None
    return Sampling(
        strategy=config.sampling,
        source_order=tuple(config.source_order.split("::")) if config.source_order else None,
        epoch_samples=args.train_num_samples,
        resampled=args.dataset_resampled,
    )


def _columns(args: argparse.Namespace) -> Columns:
    """Return columns and separator of tables where a flag differs from open_clip's default.

    Returns:
        None for the rest.
    """
    from open_clip_zerovl.prepare.settings import Columns

    stock = {"csv_img_key": "filepath", "csv_caption_key": "title", "csv_separator": "\t"}
    image, caption, separator = (
        None if getattr(args, name) == default else getattr(args, name)
        for name, default in stock.items()
    )
    captions = None if caption is None else (caption,)
    return Columns(picture=image, captions=captions, separator=separator)


def log_schedule(sources: tuple[Source, ...], schedule: Schedule) -> None:
    """Log how many samples an epoch takes from each source, and warn of sources that fill few steps."""
    logging.info(
        f"Mixture ({schedule.strategy}): {schedule.steps} steps of {schedule.effective_batch} samples an epoch, "
        f"from {len(sources)} sources:",
    )
    for source, taken in zip(sources, schedule.taken.tolist(), strict=True):
        logging.info(
            f"  {source.name}: {taken} of {source.num_samples} samples in {len(source.shards)} shards"
            + (f", weight {source.weight:g}" if source.weight != 1 else ""),
        )
    if schedule.strategy == "debiased":
        sentence = few_steps(schedule, [source.name for source in sources])
        if sentence is not None:
            logging.warning(f"{sentence}.")
