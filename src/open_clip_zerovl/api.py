"""The commands as Python functions. `zerovl COMMAND` reads the words of a call, makes it, and prints the result's text.

Keyword arguments are the flags' names with underscores: `--test-share 0.1` is `test_share=0.1`, `--from` is `from_`. True sets
a switch; None and False leave a flag out; a list gives several values, a mapping KEY=VALUE each.

    import open_clip_zerovl.api as zerovl

    packed = zerovl.pack("photos", out="packed", test_share=0.1)
    tuned = zerovl.finetune(from_="ViT-B-32/laion2b_s34b_b79k", data=packed, out="tuned")
    zerovl.search(tuned, "photos", "a red house")

Everything heavy is imported within the functions, so that a command's help does not wait for torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from typing import Annotated as A

from open_clip_zerovl.align.request import AlignFlags
from open_clip_zerovl.checkpoints.encoder import EncoderFlags
from open_clip_zerovl.core.errors import UserError, say
from open_clip_zerovl.core.files import read_json
from open_clip_zerovl.core.flags import SEED, Range, at_least, command, flag, words_of
from open_clip_zerovl.core.processes import follow_training, take_gpus
from open_clip_zerovl.core.releases import load_open_clip
from open_clip_zerovl.doctor import doctor as doctor
from open_clip_zerovl.evaluate.settings import (
    CurveFlags,
    RetrievalFiles,
    RetrievalSettings,
    SearchSettings,
    ServeSettings,
    ZeroShotSettings,
)
from open_clip_zerovl.finetune.request import SETS, FinetuneFlags
from open_clip_zerovl.prepare.settings import (
    Columns,
    Dataset,
    Limits,
    PackSettings,
    PackWork,
    Work,
)
from open_clip_zerovl.recipe.flags import REPEATED, parse_settings, settings_of
from open_clip_zerovl.report.tables import Scores
from open_clip_zerovl.results import Aligned, Hits, Packed, Run, Tuned
from open_clip_zerovl.trial.flags import TrialFlags

if TYPE_CHECKING:
    from open_clip_zerovl.checkpoints.encoder import Encoder

Given = str | os.PathLike[str]
MODELS = "exported folders, training checkpoints, NAME/pretrained"
Model = A[
    str,
    "an exported folder, local-dir:/abs/folder, a training checkpoint (.pt), or open_clip's NAME/pretrained",
]
Out = A[Path, "folder to write", "DIR"]
Pairs = A[
    str,
    "pairs: a folder of `zerovl data pack`, of shards or with a table, or named sources as --train-data takes them",
    "DIR|NAME=SHARDS::...",
]
TrainingFlags = A[tuple[str, ...], "training flags", "-- FLAGS"]

# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


@command
def pack(
    *inputs: A[
        str,
        "a folder of pictures with .txt or .json beside them, or sorted into classes (CLASS/1.jpg), a CSV, TSV or JSON "
        "lines, parquet, a `datasets` folder (save_to_disk), tars (img2dataset's, for example), a list of addresses; NAME "
        "makes it a source of its own",
        "[NAME=]INPUT",
    ],
    out: Out,
    drop_near: A[
        str | None,
        "leave out training pictures that are copies of these sets' (as for `data near`)",
        SETS,
    ] = None,
    settings: PackSettings,
    columns: A[Columns, "columns (default: guessed from their names)"],
    work: A[PackWork, "work"],
    limits: A[Limits, "work"],
) -> Packed:
    """Write pictures and captions, in the form in which they are, as webdataset shards.

    Beside the shards stand sizes.json, a held-out set and a report. The same call continues where an earlier one stopped.

    Args:
        inputs: folders, tables, tars or addresses; `NAME=INPUT` makes a source of its own.
        out: folder to write.

    Raises:
        UserError: an input of another form, a folder of other inputs, or nothing to pack.
    """
    from open_clip_zerovl.prepare.pack import pack as pack_inputs
    from open_clip_zerovl.prepare.report import next_lines

    settings = replace(settings, columns=columns)
    if drop_near is not None:
        from open_clip_zerovl.prepare.near import near_exclusion

        exclusion = near_exclusion(drop_near, out, threads=work.threads, progress=work.progress)
        settings = replace(settings, exclusion=exclusion)
    report = pack_inputs(inputs, out, settings, limits=limits, work=work)
    text = "\n".join(next_lines(report, out)) if work.progress else ""
    return Packed(_absolute(out), report, text)


def public(
    name: A[
        Literal["sbu", "cc3m", "cc12m", "vg", "coco", "f30k"],
        "SBU Captioned Photos, Conceptual Captions 3M and 12M, Visual Genome, MS-COCO and Flickr30K with Karpathy's splits",
        "NAME",
    ],
    /,
    *,
    out: Out,
    dataset: Dataset,
    seed: A[int, "seed of the order of the samples", SEED] = 0,
    work: Work,
    limits: Limits,
) -> Packed:
    """Write a published dataset as webdataset shards with sizes.json and a report.

    NAME is sbu, cc3m, cc12m, vg, coco or f30k. The same call continues where an earlier one stopped. docs/datasets.md has the
    pairs, disk and hours to expect.
    """
    from open_clip_zerovl.prepare.public import prepare_public

    options = {**vars(dataset), "seed": seed, "limits": limits, "work": work}
    return Packed(_absolute(out), prepare_public(name, out, **options))


def check(
    folder: A[Path, "a source's folder of shards", "DIR"],
    /,
    *,
    sizes: A[bool, "only count the samples, from the headers, into sizes.json"] = False,
    hash: A[bool, "also compare with the manifest's hashes"] = False,
    decode: A[bool, "also decode every picture (slow)"] = False,
    threads: A[int, "shards at the same time", at_least(1)] = 4,
) -> str:
    """Read every sample of shards, or count them into sizes.json. Exit status 2 if one has a fault.

    Raises:
        UserError: a fault, or a folder that cannot be read.
    """
    from open_clip_zerovl.prepare.check import check_shards, write_sizes

    if sizes:
        counted = write_sizes(folder, threads=threads)
        return (
            f"{folder}: {sum(counted.values()):,} samples in {len(counted):,} shards, in sizes.json"
        )
    result = check_shards(folder, threads=threads, hashes=hash, decode=decode)
    if result.faults:
        print(result.report)
        raise UserError(f"{folder} has {result.faults} faults: see above.")
    return result.report


def near(
    data: A[str, "sources as in --train-data: local shards or tables", "NAME=SHARDS::..."],
    /,
    *,
    test: A[str, "sets as for `zerovl retrieval`, or folders of pictures", SETS],
    split: A[str, "split of the sets"] = "test",
    out: A[Path, "default near", "DIR"] = Path("near"),
    distance: A[
        int | None,
        "largest distance of a copy, of 256 bits (default 56; see docs/data.md)",
        Range(
            "0 to 64 of 256 bits (distinct pictures have about 128)",
            lambda bits, _: 0 <= bits <= 64,
        ),
        "BITS",
    ] = None,
    threads: A[int, "pictures at the same time", at_least(1)] = 4,
) -> str:
    """List the pictures of sources that are copies of test pictures, re-encoded, resized or lightly cropped ones too.

    Raises:
        UserError: data that cannot be read, or a distance out of range.
    """
    from open_clip_zerovl.prepare.near import NEAR, run_overlap

    within = NEAR if distance is None else distance
    return run_overlap(data, test, out, split=split, within=within, threads=threads)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def train(*, name: str, logs: Given = "./logs/", **flags: Any) -> Run:
    """Train in a child process, whose lines are printed: `zerovl train`.

    An interrupt (KeyboardInterrupt) makes the training save a checkpoint and end, a second one ends it at once. The same call
    goes on where it stopped, or returns at once where all epochs are done.

    Args:
        name, logs: the run's folder is logs/name.
        flags: those of `zerovl train --help`, open_clip's too, and `gpus`: the number of processes (default: one a GPU).
            `train_data` also takes the result of `pack`, with its held-out sets unless `retrieval_data` is given.

    Raises:
        UserError: the training failed; its last error is in the sentence.
    """
    data = flags.get("train_data")
    if isinstance(data, Packed):
        held_out = {"retrieval_data": data.held_out} if data.held_out else {}
        flags = held_out | flags | {"train_data": data.train_data}
    given = {"name": name, "logs": logs, "resume": "latest", **flags}
    processes, arguments = take_gpus(words_of(given, {f"--{flag}" for flag in REPEATED}))
    follow_training(arguments, processes, lambda line: print(line, flush=True))
    return Run(_absolute(logs) / name)


@command
def finetune(
    training: TrainingFlags = (),
    /,
    *,
    from_: A[
        str,
        "an exported folder, a training checkpoint, or open_clip's NAME/TAG, such as ViT-B-32/laion2b_s34b_b79k",
        "MODEL",
    ],
    data: Pairs,
    out: Out,
    set: A[
        tuple[str, ...],
        "set or replace a training flag, or effective-batch; FLAG alone sets a switch, FLAG= removes a flag",
        "FLAG=VALUE",
    ] = (),
    flags: FinetuneFlags,
    curve: A[CurveFlags, "weights in between"],
    model: EncoderFlags,
) -> Tuned:
    """Fine-tune a model on a thousand to some million pairs, with settings that are chosen and explained.

    Both towers are trained; the best epoch on held-out pairs is kept and interpolated with the weights before (WiSE-FT). The
    same call goes on with one that was interrupted. Training flags (zerovl train --help) replace the chosen ones or are added:
    `--set lora=16`, or all of them after `--`; in Python `set={"lora": 16}`.

    Args:
        from_: the model to start from: a folder, a checkpoint, or open_clip's `NAME/TAG`.
        data: a folder of `pack`, or named sources.
        out: folder to write.

    Raises:
        UserError: bad input, a folder of another fine-tuning, a training that failed.
    """
    from open_clip_zerovl.finetune.finetuning import run_finetune
    from open_clip_zerovl.finetune.request import FinetuneRequest

    request = FinetuneRequest(
        **vars(flags),
        **vars(curve),
        start=_encoder(from_, model),
        data=data,
        out=_absolute(out),
        given={**parse_settings(set), **settings_of(training)},
    )
    run_finetune(request, say=lambda line: say(f"finetune: {line}"))
    return Tuned(request.out, read_json(request.out / "finetune.json"))


@command
def align(
    *,
    image: A[
        tuple[str, ...],
        "timm:NAME|FOLDER, hf:NAME|FOLDER, an exported folder, a checkpoint, NAME/TAG; several are compared",
        "ENCODER",
    ],
    text: A[
        tuple[str, ...],
        "hf:NAME|FOLDER (transformers, sentence-transformers), an exported folder, a checkpoint, NAME/TAG; several",
        "ENCODER",
    ],
    data: A[str, "pairs, as for finetune", "DIR|NAME=SHARDS::..."],
    retrieval_data: A[
        str | None, "held-out pairs in CLIP_benchmark's layout (default: as for finetune)", SETS
    ] = None,
    out: Out,
    flags: AlignFlags,
) -> Aligned:
    """Train heads on two frozen encoders, which encode the pairs once.

    A retrieval model takes the time of some epochs of matrix products. The same call goes on with one that was interrupted.

    Args:
        image, text: an encoder each, or lists of encoders to compare.
        data: a folder of `pack`, or named sources.
        out: folder to write.

    Returns:
        The best pairing; an empty record where torchrun's ranks have only encoded.

    Raises:
        UserError: encoders, data or settings that do not fit, or a file that cannot be written.
    """
    from open_clip_zerovl.align.alignment import run_align
    from open_clip_zerovl.align.request import AlignRequest
    from open_clip_zerovl.finetune.data import find_data

    pairs = find_data(data)
    request = AlignRequest(
        **vars(flags),
        images=tuple(dict.fromkeys(image)),
        texts=tuple(dict.fromkeys(text)),
        train_data=pairs.train_data,
        held_out=pairs.held_out if retrieval_data is None else retrieval_data,
        out=_absolute(out),
    )
    pairings = run_align(request)
    return Aligned(request.out, read_json(request.out / "align.json") if pairings else {})


def trial(
    training: TrainingFlags = (),
    /,
    *,
    from_: A[str | None, "the model to start from, as for finetune", "MODEL"] = None,
    image: A[
        str | None, "in its place encoders, which are aligned first: see zerovl align", "ENCODER"
    ] = None,
    text: A[str | None, "", "ENCODER"] = None,
    data: A[str, "pairs, as for finetune", "DIR|NAME=SHARDS::..."],
    out: Out,
    flags: TrialFlags,
    model: EncoderFlags,
) -> None:
    """Train one model in several ways, and say whether a larger batch, debiased sampling or the whole recipe helps.

    All ways have the same compute, data, seeds and first weights. The same call continues after a stop; more --seeds add runs.
    Training flags after -- hold for all arms: `-- --freeze text`.
    """
    from open_clip_zerovl.trial.inputs import Request
    from open_clip_zerovl.trial.running import run_trial

    encoders = None if image is None or text is None else (image, text)
    if (encoders is None) is (from_ is None) or (encoders is None and (image or text)):
        raise UserError(
            "give the start of the trial: --from MODEL, or --image ENCODER --text ENCODER"
        )
    request = Request(
        **vars(flags),
        start=_encoder(from_ or "", model),
        data=data,
        out=_absolute(out),
        encoders=encoders,
        given=settings_of(training),
    )
    run_trial(request, say=lambda line: say(f"trial: {line}"))


def export(
    checkpoint: A[
        str,
        "logs/NAME/checkpoints/epoch_N.pt; for transformers also an exported folder or open_clip's NAME/pretrained",
        "CHECKPOINT",
    ],
    out: A[Path | None, "folder to write", "DIR"] = None,
    /,
    *,
    here: A[
        bool,
        "CHECKPOINT is an exported folder that was moved: write its new path into it, for stock open_clip, and end",
    ] = False,
    format: A[Literal["open_clip", "transformers"], "form of the folder"] = "open_clip",
    model: A[
        str | None, "the model, if no params.txt beside the checkpoint finds it", "NAME|FILE.json"
    ] = None,
    text_model: A[
        str | None, "folder of the HF text tower, if params.txt does not name it", "DIR"
    ] = None,
    license: A[
        str | None, "licence in the model card: mit, apache-2.0, cc-by-4.0, ...", "NAME"
    ] = None,
    push_to_hub: A[
        str | None,
        "then push the folder to NAMESPACE/NAME on the Hugging Face hub, in one commit",
        "REPO",
    ] = None,
    private: A[bool, "make the repository a private one, if it is not there"] = False,
    fp16: A[bool, "store the weights in half precision, half the size"] = False,
    force: A[bool, "replace an earlier export that is there"] = False,
) -> str:
    """Write a training checkpoint as a folder for open_clip, or for transformers' AutoModel and AutoProcessor.

    open_clip.create_model_and_transforms loads the first as local-dir:FOLDER.

    Returns:
        How the folder is loaded.

    Raises:
        UserError: a checkpoint that cannot be loaded, a folder of other files.
    """
    if here:
        from open_clip_zerovl.checkpoints.export import absolute
        from open_clip_zerovl.models.configs import write_paths_here

        folder = absolute(checkpoint)
        changed = write_paths_here(folder)
        return _loading(
            "Its new path is written" if changed else "Nothing had to be changed", folder
        )
    if out is None:
        raise UserError("a folder to write is missing: zerovl export CHECKPOINT DIR")
    show_progress()
    from open_clip_zerovl.checkpoints.export import check_hub, push_folder

    if push_to_hub:
        check_hub(push_to_hub)
    options: dict[str, Any] = {
        "model": _registered(model),
        "text_model": text_model,
        "precision": "fp16" if fp16 else None,
        "licence": license,
        "force": force,
    }
    if format == "transformers":
        from open_clip_zerovl.checkpoints.transformers_folder import export_transformers

        folder = export_transformers(checkpoint, out, **options)
        said = f"Exported. Load it with transformers.AutoModel.from_pretrained('{folder}') and AutoProcessor."
    else:
        from open_clip_zerovl.checkpoints.export import export_local_dir, loading_notes

        folder = export_local_dir(checkpoint, out, **options)
        said = _loading("Exported", folder.resolve(), *loading_notes(folder, moved=not push_to_hub))
    if push_to_hub:
        logging.getLogger(push_folder.__module__).info("pushing %s to %s", folder, push_to_hub)
        said += f"\nPushed: {push_folder(folder, push_to_hub, private=private)}"
    return said


def show_progress() -> None:
    """Print the progress lines of `checkpoints` from now on, and one at once, since imports take seconds."""
    logger = logging.getLogger("open_clip_zerovl.checkpoints")
    logger.setLevel(logging.INFO)
    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("zerovl: %(message)s"))
    logger.handlers = [lines]
    logger.propagate = False  # a handler of the root, which open_clip's first warning adds, would repeat these lines
    logger.info("loading open_clip")
    load_open_clip()


def _loading(done: str, folder: Path, *notes: str) -> str:
    load = f"{done}. Load it with open_clip.create_model_and_transforms('local-dir:{folder}')."
    return "\n".join([load, *notes])


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(model: Given, data: Given, task: str = "retrieval", **flags: Any) -> Scores:
    """Score a model: `zerovl retrieval`, or `zerovl zero-shot` with `task="zero-shot"`.

    Args:
        model: a folder, a checkpoint, `NAME/TAG`, or the result of `train`, `finetune` or `align`.
        data: sets, `NAME=SET::...`.
        flags: those of the command.

    Raises:
        KeyError: a task of another name.
        UserError: as the command's errors.
    """
    tasks: dict[str, Callable[..., Scores]] = {"retrieval": retrieval, "zero-shot": zero_shot}
    return tasks[task](model, data=data, **flags)


@command
def retrieval(
    *models: A[Model, "[NAME=]MODEL"],
    data: A[
        str,
        "a set is a folder in CLIP_benchmark's webdataset layout, shards as training reads them, a table of pairs "
        "(pairs.csv, or valid_anno.csv@PICTURES) or dataset_coco.json@PICTURES (Karpathy)",
        SETS,
    ],
    flags: EncoderFlags,
    settings: RetrievalSettings,
    files: RetrievalFiles,
) -> Scores:
    """Score zero-shot retrieval both ways, with the checkpoint's own transform, as CLIP_benchmark measures it.

    Several models are scored on the same pairs, with the difference of RSUM from the first. On several GPUs: torchrun
    --nproc-per-node=N -m open_clip_zerovl.cli retrieval ...
    """
    from open_clip_zerovl.evaluate.retrieval import run_retrieval
    from open_clip_zerovl.prepare.door import sets_as_shards

    data = sets_as_shards(data, say=say)
    several = len(models) > 1
    encoders = _encoders(models, flags) if several else _encoder(models[0], flags)
    return run_retrieval(encoders, data, settings, files)


@command
def zero_shot(
    model: A[Model, "MODEL"],
    /,
    *,
    data: A[
        str,
        "a set is a folder of class folders (or of sources with such folders), shards with a class, a folder in "
        "CLIP_benchmark's layout",
        SETS,
    ],
    flags: EncoderFlags,
    settings: ZeroShotSettings,
) -> Scores:
    """Score zero-shot classification as CLIP_benchmark measures it, with intervals, for each class and source.

    A class is the mean of its captions in all templates.
    """
    from open_clip_zerovl.evaluate.zero_shot import run_zero_shot
    from open_clip_zerovl.prepare.door import labelled_as_shards

    return run_zero_shot(_encoder(model, flags), labelled_as_shards(data, say=say), settings)


@dataclass(frozen=True, kw_only=True)
class ProbeFlags(EncoderFlags):
    """Flags of a model of which only the image tower runs."""

    batch_size: int = flag(256, "samples encoded at once", range=at_least(1))


def linear_probe(
    model: A[Model, "MODEL"],
    /,
    *,
    train: A[
        str, "a folder of class folders, or webdataset shards (DIR or DIR/{000..099}.tar)", "DATA"
    ],
    test: A[str, "the test set", "DATA"],
    out: A[Path, "results and stored features", "DIR"],
    label: A[str, "member that holds the class", "cls|json:FIELD"] = "cls",
    amp: A[bool, "run the tower in bf16"] = False,
    seed: A[int, "of the images by which C is chosen", SEED] = 0,
    flags: ProbeFlags,
) -> str:
    """Fit logistic regression on the image tower's features before the projection.

    An interrupted call with the same --out continues.
    """
    from open_clip_zerovl.evaluate.probe import probe_row, run_linear_probe

    how: dict[str, Any] = {"out": out, "label": label, "amp": amp, "seed": seed}
    result = run_linear_probe(_encoder(model, flags), train, test, **how)
    return f"{probe_row(result)}\nWritten to {out}"


@command
def search(
    *words: A[
        str,
        f"models ({MODELS}); a folder of pictures, shards (DIR or DIR/{{000..099}}.tar), or a CSV; the words "
        "(none with --image of a single model, or with --serve)",
        "[NAME=]MODEL ... DIR WORDS",
    ],
    flags: EncoderFlags,
    settings: SearchSettings,
    page: ServeSettings,
) -> Hits | None:
    """Find the pictures of a folder that are nearest to a text or to a picture.

    Pictures are embedded once and kept; changed ones, and those for another model, are embedded again. A call that was stopped
    continues when it is made again.

    Returns:
        The hits of the first model; None with --serve.
    """
    given = list(words)
    by_image_alone = settings.image is not None and len(given) == 2
    query = "" if page.serve or by_image_alone else given.pop()
    if len(given) < 2:
        raise UserError("give a model, a folder of pictures, and the words to search for")
    data = given.pop()
    from open_clip_zerovl.prepare.door import as_shards, holds_rows

    place = Path(data).expanduser()
    if not place.is_dir() or holds_rows(place):
        data = as_shards(data, say=say)
    if page.serve:
        from open_clip_zerovl.evaluate.search import serve

        serve(_encoders(given, flags), data, page, settings.cache)
        return None
    from open_clip_zerovl.evaluate.search import run_search

    if not query.strip() and settings.image is None:
        raise UserError("there is nothing to search for: give words, or a picture by --image")
    results, text = run_search(_encoders(given, flags), data, replace(settings, words=query))
    first = next(iter(results.values()))
    return Hits(first.hits, text)


# ---------------------------------------------------------------------------------------------------------------------
# What several functions share
# ---------------------------------------------------------------------------------------------------------------------


def _encoder(model: str, flags: EncoderFlags, *, one_of_several: bool = False) -> Encoder:
    """Make the encoder of a model with a command's flags.

    Args:
        one_of_several: the flags are of the training checkpoints among the command's models; an exported folder beside them
            has its own config and text tower. Else a folder is given them too, and refuses them.
    """
    from open_clip_zerovl.checkpoints.encoder import Encoder

    described: dict[str, Any] = {"model_name": None, "text_model": None}
    if not one_of_several or Path(model).expanduser().is_file():
        name = _registered(flags.model_name)
        described = {"model_name": name, "text_model": flags.text_model}
    described |= {"device": flags.device, "batch_size": flags.batch_size, "workers": flags.workers}
    return Encoder(model=model, **described)


def _encoders(models: Sequence[str], flags: EncoderFlags) -> dict[str, Encoder]:
    """Make the encoders of a command's models, by the names that these have: [NAME=]MODEL."""
    return {
        name: _encoder(model, flags, one_of_several=True)
        for name, model in name_models(models).items()
    }


def _registered(model: str | None) -> str | None:
    """Return the name of a model, and register the model of a FILE.json."""
    if model is None or not model.endswith(".json"):
        return model
    from open_clip_zerovl.models.configs import register_model_file

    return register_model_file(model)


def name_models(models: Sequence[str]) -> dict[str, str]:
    """Name models as `NAME=MODEL` says, or after the path, checkpoints and a folder `model` after their run's folder.

        ["random=a.pt", "logs/run/checkpoints/epoch_9.pt", "mine/model"]
        ->  {"random": "a.pt", "run": "logs/run/checkpoints/epoch_9.pt", "mine": "mine/model"}

    Raises:
        UserError: two models of one name, or one without a name.
    """
    named: dict[str, str] = {}
    for entry in models:
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        if not name:
            place = Path(path.removeprefix("local-dir:"))
            name = place.parent.parent.name if place.parent.name == "checkpoints" else place.stem
            if place.name == "model":
                name = place.parent.name or name
        if not name or not path or name in named:
            raise UserError(
                f"model {entry!r} needs a name of its own; write NAME={path or 'MODEL'}"
            )
        named[name] = path
    return named


def _absolute(folder: Given) -> Path:
    return Path(folder).expanduser().absolute()
