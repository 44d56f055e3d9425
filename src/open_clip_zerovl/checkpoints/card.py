"""The README.md of an exported folder: how to load the model, its description, its training and its scores.

`card.md.j2` is the text. A card holds only facts that were read: from the run's `params.txt`, from the `results.jsonl` that
open_clip writes beside the checkpoints, and from the model's config. Its owner gives the licence, or the card names none. Its
front matter is what a hub lists a model by: base models, data sets and scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from open_clip.pretrained import get_pretrained_cfg
from torch import Tensor

from open_clip_zerovl.checkpoints.spec import ModelSpec, read_params
from open_clip_zerovl.checkpoints.weights import read_epoch
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.local_dir import LOCAL_DIR
from open_clip_zerovl.models.text_towers import IMPORT_LINE
from open_clip_zerovl.report.record import RECORD, read_record

# ---------------------------------------------------------------------------------------------------------------------
# Front matter, in the form in which the trainers of transformers and sentence-transformers write `model-index`
# ---------------------------------------------------------------------------------------------------------------------

CARD_FILE = "README.md"
#: Entries that describe weights, so that they stay where the same weights are written for another library.
OF_WEIGHTS = ("base_model", "datasets", "model-index")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_DATA_SET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
_RECALL = re.compile(r"(?:(.+)_)?(image_to_text|text_to_image)_R@(\d+)")
_RSUM = re.compile(r"(?:(.+)_)?(rsum)")
_ACCURACY = re.compile(r"(.+)[_-](top\d+|mean_per_class)")
_RETRIEVAL = {"type": "image-text-retrieval", "name": "Image-text retrieval"}
_CLASSES = {"type": "zero-shot-image-classification", "name": "Zero-shot image classification"}


def _read_front_matter(folder: Path) -> dict[str, Any]:
    """Read the OF_WEIGHTS entries of a folder's card.

    Returns:
        {} without a card or front matter.

    Raises:
        UserError: it is not YAML.
    """
    file = folder / CARD_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    front = re.match(r"---\n(.*?)^---$", text, re.MULTILINE | re.DOTALL)
    if front is None:
        return {}
    with reading(file, "mend the lines between its first two ---"):
        entries = yaml.safe_load(front[1]) or {}
        return {name: entries[name] for name in OF_WEIGHTS if name in entries}


def repositories_of(name: str) -> list[str]:
    """Name the hub's repositories of a model or encoder: its own, or the base models of an exported folder.

    Args:
        name: as `load_model` or `zerovl align` takes it.

    Returns:
        [] for a model that no repository is known of.
    """
    folder = Path(name.partition(":")[2] if name.startswith((LOCAL_DIR, "hf:")) else name)
    if folder.expanduser().exists():
        known = _read_front_matter(folder.expanduser()).get("base_model", [])
        return [known] if isinstance(known, str) else list(known)
    kind, colon, rest = name.partition(":")
    if colon and kind == "timm":
        import timm

        cfg = timm.models.get_pretrained_cfg(rest)
        return [cfg.hf_hub_id] if cfg is not None and cfg.hf_hub_id else []
    if colon:
        return [rest] if kind in ("hf", "hf-hub") and _REPOSITORY.fullmatch(rest) else []
    model, _, tag = name.rpartition("/")
    repository = (get_pretrained_cfg(model.replace("/", "-"), tag) or {}).get("hf_hub", "")
    return [repository.rstrip("/")] if repository else []


def _front_matter(
    title: str,
    metrics: Mapping[str, float],
    params: Mapping[str, Any],
    base_models: Sequence[str],
) -> dict[str, Any]:
    """Make the OF_WEIGHTS entries of a run's weights.

    Args:
        title: name of the model.
        metrics: as in `ModelCard`.
        params: of the run; its start and its data count.
        base_models: further models on which these weights stand.
    """
    started = [params.get("init_from"), params.get("model")]
    if params.get("pretrained"):
        started.append(f"{params.get('model')}/{params['pretrained']}")
    names = [*base_models, *(str(name) for name in started if name)]
    repositories = dict.fromkeys(
        repository for name in names for repository in repositories_of(name)
    )
    data_sets = dict.fromkeys(_DATA_SET.findall(str(params.get("train_data") or "")))
    results = _results(metrics)
    entries = {
        "base_model": list(repositories),
        "datasets": list(data_sets),
        "model-index": [{"name": title, "results": results}] if results else [],
    }
    return {name: entry for name, entry in entries.items() if entry}


def _results(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Group the scores by task and set, with chance in a score's name."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for name, value in metrics.items():
        if match := _RECALL.fullmatch(name):
            task, data, factor = _RETRIEVAL, match[1], 100
            kind, words = f"{match[2]}_recall_at_{match[3]}", f"{match[2]} R@{match[3]} in %"
        elif match := _RSUM.fullmatch(name):
            task, data, factor = _RETRIEVAL, match[1], 1
            kind, words = "rsum", "RSUM of 600"
        elif match := _ACCURACY.fullmatch(name):
            task, data, factor = _CLASSES, match[1], 100
            kind, words = match[2], f"{match[2]} in %"
        else:
            continue
        if (chance := metrics.get(f"{name}_chance")) is not None:
            words += f" (chance {factor * chance:.1f})"
        data = data or "validation pairs"
        entry = results.setdefault(
            (task["type"], data),
            {
                "task": task,
                "dataset": {"type": data.replace(" ", "-"), "name": data},
                "metrics": [],
            },
        )
        score = {"type": kind, "value": round(factor * value, 2), "name": words.replace("_", " ")}
        entry["metrics"].append(score)
    return list(results.values())


def _as_text(entries: Mapping[str, Any]) -> str:
    """Write entries as the lines between a card's first two ---."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # tasks are repeated, not named

    return yaml.dump(dict(entries), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)


# ---------------------------------------------------------------------------------------------------------------------
# The card
# ---------------------------------------------------------------------------------------------------------------------

FOLDER_HERE = "/path/to/this/folder"  # in the lines that load the model; `push_folder` writes the repository's name there
# Of a model with a Hugging Face text tower in a folder; the hub's card is without it.
MOVED = (
    "After moving the folder, `zerovl export FOLDER --here` writes its new path into `open_clip_config.json` "
    "(`model_cfg.text_cfg.hf_model_name`), where open_clip looks for the text tower."
)

# The first arguments of a card's recipe, in this order; others that were given follow by name.
_FIRST = (
    "epochs", "train_num_samples", "lr", "lr_min", "lr_scheduler", "warmup", "warmup_share", "wd", "beta1", "beta2", "eps",
    "grad_clip_norm", "precision", "sampling", "seed",
)  # fmt: skip
# Arguments that a card does not name: they have a line of their own, or change no weight.
_ELSEWHERE = frozenset({
    "model", "name", "train_data", "train_data_upsampling_factors", "batch_size", "dga_steps",
    "accum_freq", "world_size", "val_data", "val_num_samples", "imagenet_val", "imagenet_v2",
    "retrieval_data", "zero_shot_data", "retrieval_frequency", "retrieval_transform",
    "retrieval_captions", "val_frequency", "zeroshot_frequency", "dataset_type", "csv_separator",
    "csv_img_key", "csv_caption_key", "logs", "log_local", "log_path", "log_level",
    "log_every_n_steps", "report_to", "wandb", "wandb_notes", "wandb_project_name", "tensorboard",
    "tensorboard_path", "verbose", "debug", "save_logs", "save_frequency", "save_most_recent",
    "save_every_steps", "keep_checkpoints", "delete_previous_checkpoint", "checkpoint_path",
    "resume", "remote_sync", "remote_sync_frequency", "remote_sync_protocol", "copy_codebase",
    "cache_dir", "shard_cache", "shard_cache_gib", "workers", "device",
    "dist_url", "dist_backend", "distributed", "rank", "local_rank", "horovod", "ddp_static_graph",
    "no_set_device_rank", "local_loss", "gather_with_grad", "loss_dist_impl", "torchscript",
    "torchcompile", "trace", "grad_checkpointing", "dga_retain", "dga_check", "loss_chunk",
    "sort_text",
})  # fmt: skip
# What open_clip and `--retrieval-data` write into results.jsonl beside the scores.
_NO_SCORES = ("epoch", "num_samples", "retrieval_captions", "retrieval_transform")
_MODEL = "## Model"  # the heading from which on a card speaks of the model alone


@dataclass(frozen=True)
class ModelCard:
    """The contents of a card.

    Attributes:
        weights: the model's.
        origin: a sentence about the source of the weights.
        params: arguments of the run, by name.
        given: names of those that are not at their defaults; None: unknown, and all that are set are named.
        sizes: samples of each source.
        metrics: by name: `SET_image_to_text_R@1` ... `SET_rsum` become a table, other metrics a list.
        notes: sentences for the end.
        library: the one that the folder is for, of `open_clip` and `transformers`.
        licence: a hub's name of it, such as `mit`.
        base_models: models and encoders on which the weights stand, as commands take them; those of params count too.
        title, body, front: of another card of the model, which replace what params, metrics and notes would give.

    Raises:
        UserError: a licence that is not a name.
    """

    spec: ModelSpec
    weights: Mapping[str, Tensor]
    origin: str
    params: Mapping[str, Any] | None = None
    given: Collection[str] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] | None = None
    notes: Sequence[str] = ()
    library: str = "open_clip"
    licence: str | None = None
    base_models: Sequence[str] = ()
    title: str = ""
    body: str = ""
    front: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.licence is not None and not re.fullmatch(
            r"[A-Za-z0-9][A-Za-z0-9.+_-]*", self.licence
        ):
            raise UserError(
                f"the licence '{self.licence}' is not a name that a hub takes; give one such as mit, apache-2.0, cc-by-4.0"
            )

    def text(self, *, needs_import: bool = False, trainable: bool = True) -> str:
        """Render the card as Markdown with the front matter of a hub.

        Args:
            needs_import: open_clip 3.3 builds the model only after this package's import.
            trainable: an optimizer can go on from the folder's weights.
        """
        params, metrics = self.params or {}, self.metrics or {}
        name = _public(self.spec.name)
        title = self.title or (f"{params['name']} ({name})" if params.get("name") else name)
        front = {
            "library_name": self.library,
            "pipeline_tag": "zero-shot-image-classification",
            **({"license": self.licence} if self.licence else {}),
            "tags": ["clip", "zerovl"],
            **(self.front or _front_matter(title, metrics, params, self.base_models)),
        }
        folder = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=StrictUndefined,
        )
        return folder.get_template("card.md.j2").render(
            vars(self)
            | {
                "title": title,
                "front": _as_text(front),
                "about": _MODEL,
                "here": FOLDER_HERE,
                "import_line": IMPORT_LINE,
                "needs_import": needs_import,
                "moved": MOVED if self.spec.text_source else "",
                "trainable": trainable,
                "model": _model_facts(self.spec, self.weights),
                "recipe": _recipe_facts(params, self.given) if params else [],
                "data": _data(params, self.sizes),
                **_measured(metrics),
            }
        )


def run_card(
    checkpoint: Path, spec: ModelSpec, weights: Mapping[str, Tensor], **options: Any
) -> ModelCard:
    """Describe a training checkpoint as a card, with the metrics of its own epoch.

    `options` are attributes of `ModelCard`.

    Raises:
        UserError: `results.jsonl` beside the checkpoint is not JSON, or `params.txt` holds a value that no training writes.
    """
    facts = run_facts(checkpoint)
    params, epoch = facts["params"], read_epoch(checkpoint)
    metrics = {}
    if epoch is not None:
        file = checkpoint.parent / "results.jsonl"
        metrics = {**read_results(file, epoch), **_chances(checkpoint, epoch)}
    when = f"after epoch {epoch}" + (f" of {params['epochs']}" if params.get("epochs") else "")
    origin = f"An open_clip training checkpoint{f', {when}' if epoch is not None else ''}."
    card = ModelCard(spec, weights, origin, **facts, metrics=metrics, **options)
    with reading(f"the params.txt of {checkpoint}", "mend it, or move it away and name the model"):
        card.text()
    return card


def run_facts(checkpoint: Path) -> dict[str, Any]:
    """Read `params`, `given` and `sizes` of a card from the `params.txt` and the record of a checkpoint's run."""
    params, record = read_params(checkpoint), _record_of(checkpoint)
    if not record.get("start"):
        return {"params": params}
    begin = record["start"][-1]
    settings, sources = begin.get("settings") or {}, begin.get("sources") or {}
    return {"params": {**settings, **params}, "given": settings, "sizes": sources}


def _record_of(checkpoint: Path) -> dict[str, list[dict[str, Any]]]:
    folder = checkpoint.parent.parent
    return read_record(folder) if (folder / RECORD).is_file() else {}


def _chances(checkpoint: Path, epoch: int) -> dict[str, float]:
    """Read the scores of chance in the record of an epoch, as `SET_rsum_chance` and `SET_top1_chance`."""
    chances: dict[str, float] = {}
    record = _record_of(checkpoint)
    for line in [*record.get("retrieval", ()), *record.get("zero-shot", ())]:
        for name, metrics in line["metrics"].items() if line["at"] == epoch else ():
            known = {key: value for key, value in metrics.items() if key.endswith("_chance")}
            chances |= {f"{name}_{key}": value for key, value in known.items()}
    return chances


def folder_card(
    folder: Path, spec: ModelSpec, weights: Mapping[str, Tensor], **options: Any
) -> ModelCard:
    """Describe an exported folder for another library, with the model, recipe, data and scores of the folder's own card.

    A folder without a card of ours has the facts of its model alone; `options` are attributes of `ModelCard`.
    """
    file = folder / CARD_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    parts = re.search(
        rf"^# (.+)$.*?^(.*?) ?It loads in .*?^{_MODEL}$\n(.*)", text, re.MULTILINE | re.DOTALL
    )
    if parts is None:
        origin = f"Made from {_public(spec.name)}, a model of open_clip."
        return ModelCard(spec, weights, origin, base_models=[str(folder)], **options)
    of_weights: dict[str, Any] = {
        "front": _read_front_matter(folder),
        "body": parts[3].rstrip("\n"),
    }
    return ModelCard(spec, weights, parts[2], title=parts[1], **of_weights, **options)


def read_results(file: Path, epoch: int) -> dict[str, float]:
    """Read the metrics of an epoch in a run's results.

    Of two with the same name the later.

    Returns:
        {} without a file.
    """
    metrics: dict[str, float] = {}
    if not file.is_file():
        return metrics
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        with reading(file, f"mend or remove line {number}"):
            row = json.loads(line)
        if isinstance(row, dict) and row.pop("epoch", None) == epoch:
            metrics.update(
                {
                    name: value
                    for name, value in row.items()
                    if isinstance(value, (int, float)) and name not in _NO_SCORES
                }
            )
    return metrics


def _public(name: str) -> str:
    """Return the model's name without the path of a local folder."""
    return Path(name.partition(":")[2]).name if name.startswith("local-dir:") else name


def _model_facts(spec: ModelSpec, weights: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    vision, text = spec.model_cfg["vision_cfg"], spec.model_cfg["text_cfg"]
    image_tower = (
        vision.get("timm_model_name")
        or vision.get("hf_model_name")
        or (
            f"open_clip ViT, {vision.get('layers')} layers, width {vision.get('width')}, patch {vision.get('patch_size')}"
        )
    )
    source = spec.text_source
    text_tower = (Path(source).name if source else None) or (
        f"open_clip transformer, {text.get('layers')} layers, width {text.get('width')}"
    )
    cfg = spec.preprocess_cfg
    facts = [
        ("image tower", f"{image_tower}, {vision.get('image_size')} px"),
        ("text tower", f"{text_tower}, {text.get('context_length', 77)} tokens"),
        ("embedding width", f"{spec.model_cfg['embed_dim']}"),
        ("parameters", f"{sum(tensor.numel() for tensor in weights.values()) / 1e6:,.1f} M"),
        ("image mean, standard deviation", f"{tuple(cfg['mean'])}, {tuple(cfg['std'])}"),
        ("resize", f"{cfg['resize_mode']}, {cfg['interpolation']}"),
    ]
    if (scale := weights.get("logit_scale")) is not None:
        facts.append(
            ("temperature (1 / exp(logit_scale))", f"{1 / scale.double().exp().item():.5f}")
        )
    return facts


def _recipe_facts(
    params: Mapping[str, Any], given: Collection[str] | None
) -> list[tuple[str, str]]:
    facts = []
    if batch := params.get("batch_size"):
        ranks = params.get("world_size") or 1
        steps = params.get("dga_steps") or params.get("accum_freq") or 1
        sizes = f"{batch * ranks * steps:,} = {batch} a micro-batch x {steps} accumulated x {ranks} ranks"
        facts.append(("effective batch", sizes))
    known = params if given is None else given
    for name in [*_FIRST, *sorted(set(known) - set(_FIRST) - _ELSEWHERE)]:
        value = params.get(name)
        if value is None or value is False or value in ("", (), [], {}):
            continue
        if name == "mixup_alpha" and not params.get("coin_flip_mixup"):
            continue
        facts.append((f"`--{name.replace('_', '-')}`", _without_folders(value)))
    return facts


def _without_folders(value: Any) -> str:
    """Write a value as text, of a path of the training machine the last part."""
    parts = str(value).split("::")
    return "::".join(Path(part).name if part[:1] in ("/", "~", ".") else part for part in parts)


def _data(params: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """List the sources of a run with their samples and weights."""
    factors = str(params.get("train_data_upsampling_factors") or "").split("::")
    lines = []
    for i, entry in enumerate(str(params.get("train_data") or "").split("::")):
        name, equals, _ = entry.partition("=")
        if not equals or "/" in name:
            # open_clip's unnamed data, shown by its folder's name: a folder, a file in one, or a pattern of shards in one.
            is_folder = "{" not in entry and not Path(entry).suffix
            folder = entry if is_folder else entry.partition("{")[0].rpartition("/")[0]
            name = Path(folder).name
        weight = f", weight {factors[i]}" if i < len(factors) and factors[i] else ""
        samples = f", {sizes[name]:,} samples" if name in sizes else ""
        lines += [f"{name}{samples}{weight}"] if entry else []
    return lines


def _measured(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Prepare the template's `recalls` (set -> cells of a row), `ks` and `others`."""
    tables: dict[str, dict[tuple[str, int], float]] = {}
    for name, value in metrics.items():
        if match := _RECALL.fullmatch(name):
            tables.setdefault(match[1] or "validation pairs", {})[match[2], int(match[3])] = value
    ks = sorted({k for row in tables.values() for _, k in row})
    ways = ("image_to_text", "text_to_image")
    recalls = {
        name: [
            *(f"{100 * row[way, k]:.1f}" if (way, k) in row else "" for way in ways for k in ks),
            f"{100 * sum(row.get((way, k), float('nan')) for way in ways for k in (1, 5, 10)):.1f}",
            f"{metrics[f'{name}_rsum_chance']:.1f}" if f"{name}_rsum_chance" in metrics else "",
        ]
        for name, row in tables.items()
    }
    others = []
    for name, value in metrics.items():
        if _RECALL.fullmatch(name) or name.endswith(
            ("rsum", "_chance", "_chance_upper", "rsum_best")
        ):
            continue
        chance = metrics.get(f"{name}_chance")
        others.append(
            (name, f"{value:.4f}" + ("" if chance is None else f" (chance {chance:.4f})"))
        )
    return {"recalls": recalls, "ks": ks, "others": others}
