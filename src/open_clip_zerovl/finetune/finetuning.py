"""`zerovl finetune`: from a model and pairs to a model that retrieves them better, and the cost on other data.

Files of the output folder, in the order in which they are made:

    request.json                     the arguments and a digest of the model; a later call with the same ones continues
    data/                            the pictures that are held out, and lists of the samples to train on (`split`)
    before/                          the model it starts from, unless an exported folder was given
    settings.json                    every flag of the training with its reason
    run/, training.log               the training's own folder and its output
    model/                           the chosen model, for open_clip's local-dir:, with its interpolation.json
    gallery.html, report.html        hits and misses before and after; all numbers
    finetune.json                    the same for programs; written last

Each stage that has finished is not done again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import open_clip
import torch

from open_clip_zerovl.checkpoints.card import ModelCard
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import write_local_dir
from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import (
    CONTENT,
    check_writable,
    difference,
    locked,
    read_claim,
    write_atomically,
)
from open_clip_zerovl.core.processes import (
    MEMORY_FULL,
    MemoryFull,
    gpu_memories,
    start_training,
    usable_cores,
)
from open_clip_zerovl.data.sets import parse_retrieval_data
from open_clip_zerovl.data.splits import TRAINED_ON, list_of_trained, trained_on
from open_clip_zerovl.data.tokens import WordAugment
from open_clip_zerovl.evaluate.curve import require_possible
from open_clip_zerovl.features.sources import cut_captions
from open_clip_zerovl.finetune import data as pairs
from open_clip_zerovl.finetune.data import digest_of_model
from open_clip_zerovl.finetune.outcome import RESULT, write_outcome
from open_clip_zerovl.finetune.proposal import (
    Facts,
    Setting,
    as_flags,
    choose_settings,
)
from open_clip_zerovl.finetune.request import DATA_OF_CURVE, FinetuneRequest
from open_clip_zerovl.finetune.split import (
    Prepared,
    check_keeping,
    hold_out,
    with_old_pairs,
)
from open_clip_zerovl.models.configs import CONFIG_FILE, LOCAL_DIR
from open_clip_zerovl.recipe.flags import Settings, as_arguments
from open_clip_zerovl.report.run import epoch_checkpoints

REQUEST, SETTINGS = "request.json", "settings.json"
MODEL = f"{CONTENT}--from"  # in REQUEST
RUN = "run"
LOG = "training.log"
SCORES = {"rsum": "RSUM {:.1f}", "top1": "zero-shot top-1 {:.1f} %"}
_ETA = re.compile(r" ETA: ([^\n]+)\n")
_ETA_SECONDS = 60.0  # between two lines with the time left
_TAIL_BYTES = 1 << 16
_LOOK_SECONDS = 0.5


def run_finetune(request: FinetuneRequest, *, say: Say) -> Path:
    """Fine-tune, or go on with a call that was stopped.

    Args:
        say: is called with a line about each stage.

    Returns:
        The folder of the chosen model.

    Raises:
        UserError: bad input, a folder of another fine-tuning, a training that failed.
    """
    out = request.out
    check_writable(out, folder=True)
    with locked(
        out, busy=f"another process is fine-tuning in {out}; wait for it, or choose another --out"
    ):
        arguments = _same_request(request, say)
        prepared = _prepare(request, arguments, say)
        settings, ranks = _settings(request, prepared)
        training = _training(request, prepared, settings, ranks)
        if _finished(request, arguments, training):
            say(f"finished before; {out / 'report.html'} has the report")
            return out / "model"
        _announce(prepared, settings, say)
        while True:
            try:
                epoch, checkpoint = train(training, say)
                break
            except MemoryFull:
                settings = _halved(request, settings, say)
                training = _training(request, prepared, settings, ranks)
        write_outcome(request, prepared, settings, training.scores(), epoch, checkpoint, say)
    return out / "model"


def _finished(request: FinetuneRequest, arguments: pairs.DataArguments, training: Training) -> bool:
    """Return whether an earlier call has the result, of a training that does not go on (more --patience) and the same curve."""
    result = read_claim(request.out / RESULT)
    scores = {str(epoch): score for epoch, score in training.scores().items()}
    if result is None or not training.is_over() or result["epochs"] != scores:
        return False
    other_curve = difference(result["curve"]["asked"], request.of_curve(arguments))
    return other_curve is None and (request.out / "model").is_dir()


def _same_request(request: FinetuneRequest, say: Say) -> pairs.DataArguments:
    """Claim the folder.

    Returns:
        All data arguments, in which sources and held-out sets have the names of the first call.

    Raises:
        UserError: the folder holds other files, or a training of another request, other data or another model.
    """
    file = request.out / REQUEST
    # The files of the model may be gone, of which OUT/before holds the content.
    model = digest_of_model(request.start) or (read_claim(file) or {}).get(MODEL)
    arguments = pairs.DataArguments.of(request, say)
    flags = [flag for flag in arguments.given if flag not in DATA_OF_CURVE]
    wanted = {**request.of_training(), **arguments.entries(flags), MODEL: model}
    made = [request.out / name for name in ("data", "before", SETTINGS)]
    return arguments.claim(file, wanted, begun=request.out / RUN, made=made)


def _prepare(request: FinetuneRequest, arguments: pairs.DataArguments, say: Say) -> Prepared:
    check_keeping(request)
    kept_sets = parse_retrieval_data(arguments.kept).keys() if arguments.kept else ()
    require_possible(request.rule, kept_sets)
    split = hold_out(
        arguments,
        request.out / "data",
        seed=request.seed,
        model=request.start.model,
        begun=(request.out / RUN).exists(),
        compare=request.compare_pictures,
        say=say,
    )
    # A mistake ends the call here, not after hours of training.
    require_possible(request.rule, kept_sets, parse_retrieval_data(split.new))
    pairs.labelled_sets(split.new, arguments.labelled)
    sources, train_data, factors, notes = with_old_pairs(
        request, split.train_data, split.sources.get("--keep-data")
    )
    before = starting_folder(request.start, request.out / "before", say)
    notes = [*split.notes, *notes]
    return Prepared(arguments, before, train_data, split, sources, tuple(notes), factors)


def starting_folder(start: Encoder, out: Path, say: Say) -> str:
    """Return a model as `local-dir:FOLDER`, exported to `out` first where it is a checkpoint or a tag."""
    folder = Path(start.model.removeprefix(LOCAL_DIR)).expanduser()
    if (folder / CONFIG_FILE).is_file():
        return LOCAL_DIR + str(folder.absolute())
    if not (out / CONFIG_FILE).is_file():
        say(f"exporting {start.model} to {out}")
        spec = start.spec()
        loaded: Any = replace(start, device="cpu").load()
        weights = loaded[0].state_dict()
        card = ModelCard(
            spec,
            weights,
            origin="The model that a training started from.",
            base_models=[start.model],
        )
        seen = trained_on([start.model])
        extra_files = None if seen is None else {TRAINED_ON: list_of_trained(seen)}
        write_local_dir(start.model, weights, spec, out, card=card, extra_files=extra_files)
    return LOCAL_DIR + str(out.absolute())


def _settings(request: FinetuneRequest, prepared: Prepared) -> tuple[list[Setting], int]:
    """Read the settings of the run and its ranks from an earlier call, or choose them now."""
    file = request.out / SETTINGS
    stored = read_claim(file)
    if stored is not None:
        return [Setting(**each) for each in stored["settings"]], stored["ranks"]
    facts = _facts(request, prepared)
    chosen = choose_settings(facts, request.given)
    content = {"ranks": facts.ranks, "settings": [asdict(each) for each in chosen]}
    write_atomically(file, json.dumps(content, indent=2) + "\n")
    return chosen, facts.ranks


def _facts(request: FinetuneRequest, prepared: Prepared) -> Facts:
    sources = {
        source.name: round(source.num_samples * source.weight) for source in prepared.sources
    }
    gpus = 0 if request.start.device == "cpu" else len(gpu_memories())
    masks = True
    try:
        WordAugment(open_clip.get_tokenizer(prepared.before))
    except UserError:
        masks = False
    old = 0.0 if prepared.factors is None else request.share_kept
    return Facts(
        sum(sources.values()),
        sources,
        masks,
        gpus,
        gpus > 0 and torch.cuda.is_bf16_supported(including_emulation=False),
        usable_cores(),
        old,
        has_logit_bias(prepared.before),
    )


def has_logit_bias(model: str) -> bool:
    """Return whether an exported folder's model adds a bias to its logits, as those trained by the sigmoid loss do."""
    config = json.loads(
        Path(model.removeprefix(LOCAL_DIR), CONFIG_FILE).read_text(encoding="utf-8")
    )
    return config["model_cfg"].get("init_logit_bias") is not None


def _halved(request: FinetuneRequest, settings: Sequence[Setting], say: Say) -> list[Setting]:
    """Store the settings with half of the micro-batch and twice the DGA steps, the same effective batch, and return them.

    An odd micro-batch is divided by its smallest factor.

    Raises:
        MemoryFull: the micro-batch is one sample, or was given.
    """
    values = as_flags(settings)
    size, steps = int(values["batch-size"] or 1), int(values["dga-steps"] or 1)
    if size == 1 or {"batch-size", "dga-steps"} & request.given.keys():
        raise MemoryFull(
            f"{MEMORY_FULL} with micro-batches of {size}; give a smaller --set batch-size, or a smaller model"
        )
    part = next(factor for factor in range(2, size + 1) if size % factor == 0)
    new = {"batch-size": str(size // part), "dga-steps": str(part * steps)}
    say(
        f"{MEMORY_FULL}: trained again with micro-batches of {size // part} and {part * steps} DGA steps"
    )
    halved = [replace(each, value=new.get(each.flag, each.value)) for each in settings]
    file = request.out / SETTINGS
    content = json.loads(file.read_text(encoding="utf-8"))
    content["settings"] = [asdict(each) for each in halved]
    write_atomically(file, json.dumps(content, indent=2) + "\n")
    return halved


def _training(
    request: FinetuneRequest, prepared: Prepared, settings: Sequence[Setting], ranks: int
) -> Training:
    held_out = prepared.split.new
    by_class = pairs.all_classes(held_out)
    flags: Settings = {  # that follow from the request, whatever the amount of data
        "model": prepared.before,
        "train-data": prepared.train_data,
        "train-data-upsampling-factors": prepared.factors,
        "retrieval-data": held_out,
        **({"zero-shot-data": held_out} if by_class else {}),
        "seed": str(request.seed),
        "save-frequency": "1",
        "log-every-n-steps": "10",
        **({"device": "cpu"} if request.start.device == "cpu" else {}),
        **as_flags(settings),
    }
    return Training(
        request.out,
        as_arguments(flags),
        ranks,
        int(flags["epochs"] or 0),
        request.patience,
        tuple(pairs.sets_of(held_out)),
        "top1" if by_class else "rsum",
    )


def _announce(prepared: Prepared, settings: Sequence[Setting], say: Say) -> None:
    """Print the sources, notes on captions, and each setting with its reason."""
    for source in prepared.sources:
        say(f"source {source.name}: {source.num_samples:,} samples ({source.layout})")
    tokenizer = open_clip.get_tokenizer(prepared.before)
    length = tokenizer.context_length
    looked, cut, longest = cut_captions(tokenizer, length, prepared.sources)
    if cut:
        say(
            f"note: {cut:,} of {looked:,} sampled captions are longer than the model's {length} tokens (the longest has "
            f"{longest}) and are cut; say first what matters most in a caption"
        )
    if pairs.all_classes(prepared.split.new):
        say(
            "note: pictures of a class share captions, so zero-shot top-1 chooses epoch and weights, not RSUM"
        )
    say("settings (--set FLAG=VALUE replaces one):")
    for setting in settings:
        say(str(setting))


# ---------------------------------------------------------------------------------------------------------------------
# The training: a process of its own, watched by the scores that it writes after each epoch
# ---------------------------------------------------------------------------------------------------------------------


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
        return epoch_checkpoints(self.checkpoints)

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
