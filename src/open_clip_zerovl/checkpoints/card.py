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

from huggingface_hub import CardData, EvalResult, ModelCardData
from huggingface_hub import ModelCard as HubCard
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from open_clip.pretrained import get_pretrained_cfg
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import ModelSpec, read_params
from open_clip_zerovl.checkpoints.weights import read_epoch
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.configs import LOCAL_DIR
from open_clip_zerovl.models.text_towers import IMPORT_LINE
from open_clip_zerovl.report.run import RECORD, read_record
from open_clip_zerovl.sampling.schedule import Batching

CARD_FILE = "README.md"
FOLDER_HERE = "/path/to/this/folder"  # in the lines that load the model; `push_folder` writes the repository's name there
# Of a model with a Hugging Face text tower in a folder; the hub's card is without it.
MOVED = (
    "After moving the folder, `zerovl export FOLDER --here` writes its new path into `open_clip_config.json` "
    "(`model_cfg.text_cfg.hf_model_name`), where open_clip looks for the text tower."
)
_MODEL = "## Model"  # the heading from which on a card speaks of the model alone

# ---------------------------------------------------------------------------------------------------------------------
# Front matter: base models, data sets and scores, as the hub's own library writes and reads them
# ---------------------------------------------------------------------------------------------------------------------

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_DATA_SET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
_RETRIEVAL: dict[str, Any] = {
    "task_type": "image-text-retrieval",
    "task_name": "Image-text retrieval",
}
_CLASSES: dict[str, Any] = {
    "task_type": "zero-shot-image-classification",
    "task_name": "Zero-shot image classification",
}
# Names of scores (their set is the first group), task, the factor of the shown number, and its words
_SCORES: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    (r"(?:(.+)_)?(image_to_text|text_to_image)_R@(\d+)", _RETRIEVAL, 100, r"\2 R@\3 in %"),
    (r"(?:(.+)_)?rsum", _RETRIEVAL, 1, "RSUM of 600"),
    (r"(.+)[_-](top\d+|mean_per_class)", _CLASSES, 100, r"\2 in %"),
)


def _data_of(folder: Path) -> CardData:
    """Read the front matter of a folder's card, which may be missing.

    Raises:
        UserError: it is not YAML.
    """
    file = folder / CARD_FILE
    if not file.is_file():
        return ModelCardData()
    with reading(file, "mend the lines between its first two ---"):
        return HubCard.load(file, ignore_metadata_errors=True).data


def repositories_of(name: str) -> list[str]:
    """Name the hub's repositories of a model or encoder: its own, or the base models of an exported folder.

    Args:
        name: as `load_model` or `zerovl align` takes it.

    Returns:
        [] for a model that no repository is known of.
    """
    folder = Path(name.partition(":")[2] if name.startswith((LOCAL_DIR, "hf:")) else name)
    if folder.expanduser().exists():
        known = _data_of(folder.expanduser()).get("base_model") or []
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


def _scores(metrics: Mapping[str, float]) -> list[EvalResult]:
    """Describe the scores among some metrics, with chance in a score's name."""
    scores = []
    for name, value in metrics.items():
        for pattern, task, factor, words in _SCORES:
            if (match := re.fullmatch(pattern, name)) is None:
                continue
            chance = metrics.get(f"{name}_chance")
            beside = "" if chance is None else f" (chance {factor * chance:.1f})"
            data = match[1] or "validation pairs"
            kind = name.removeprefix(match[1] or "").lstrip("_-").replace("R@", "recall_at_")
            score = EvalResult(
                **task, dataset_type=data.replace(" ", "-"), dataset_name=data, metric_type=kind,
                metric_name=match.expand(words).replace("_", " ") + beside,
                metric_value=round(factor * value, 2),
            )  # fmt: skip
            scores.append(score)
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# The card
# ---------------------------------------------------------------------------------------------------------------------

# Arguments that a card does not name: they have a line of their own, or change no weight.
_ELSEWHERE = frozenset({
    "model", "name", "train_data", "train_data_upsampling_factors", "batch_size", "dga_steps",
    "accum_freq", "world_size", "val_data", "val_num_samples", "imagenet_val", "imagenet_v2",
    "retrieval_data", "zero_shot_data", "retrieval_frequency", "retrieval_transform",
    "retrieval_captions", "val_frequency", "zeroshot_frequency", "dataset_type", "csv_separator",
    "csv_img_key", "csv_caption_key", "logs", "log_local", "log_path", "log_level",
    "log_every_n_steps", "report_to", "wandb", "wandb_notes", "wandb_project_name", "tensorboard",
    "tensorboard_path", "debug", "save_logs", "save_frequency", "save_most_recent",
    "save_every_steps", "keep_checkpoints", "delete_previous_checkpoint", "checkpoint_path",
    "resume", "remote_sync", "remote_sync_frequency", "remote_sync_protocol", "copy_codebase",
    "cache_dir", "shard_cache", "shard_cache_gib", "workers", "device",
    "dist_url", "dist_backend", "distributed", "rank", "local_rank", "horovod", "ddp_static_graph",
    "no_set_device_rank", "local_loss", "gather_with_grad", "loss_dist_impl", "torchscript",
    "torchcompile", "trace", "grad_checkpointing", "dga_retain", "dga_check", "loss_chunk",
    "sort_text",
})  # fmt: skip


@dataclass(frozen=True)
class ModelCard:
    """The contents of a card.

    Attributes:
        weights: the model's.
        origin: a sentence about the source of the weights.
        params: arguments of the run, by name.
        given: names of those that are not at their defaults; None: unknown, and all that are set are named.
        sizes: samples of each source.
        metrics: by name; scores among them are `SET_image_to_text_R@1` ... `SET_rsum`, `SET_top1` and its kind.
        notes: sentences for the end.
        library: the one that the folder is for, of `open_clip` and `transformers`.
        licence: a hub's name of it, such as `mit`.
        base_models: models and encoders on which the weights stand, as commands take them; those of params count too.
        title, body, data: of another card of the model, which replace what params, metrics and notes would give.
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
    data: CardData | None = None

    def text(self, *, needs_import: bool = False, trainable: bool = True) -> str:
        """Render the card as Markdown with the front matter of a hub.

        Args:
            needs_import: open_clip 3.3 builds the model only after this package's import.
            trainable: an optimizer can go on from the folder's weights.
        """
        params, metrics = self.params or {}, self.metrics or {}
        name = public_name(self.spec.name)
        title = self.title or (f"{params['name']} ({name})" if params.get("name") else name)
        scores = _scores(metrics)
        front = ModelCardData(
            library_name=self.library,
            pipeline_tag="zero-shot-image-classification",
            license=self.licence,
            tags=["clip", "zerovl"],
            model_name=title,
            **self._stands_on(params, scores),
        )
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
                "front": front.to_yaml(),
                "about": _MODEL,
                "here": FOLDER_HERE,
                "import_line": IMPORT_LINE,
                "needs_import": needs_import,
                "moved": MOVED if self.spec.text_source else "",
                "trainable": trainable,
                "model": _model_facts(self.spec, self.weights),
                "recipe": _recipe_facts(params, self.given) if params else [],
                "data": _data(params, self.sizes),
                "scores": scores,
            }
        )

    def _stands_on(self, params: Mapping[str, Any], scores: list[EvalResult]) -> dict[str, Any]:
        """Name what the weights stand on, and their scores, for the front matter.

        Another card's hold for the same weights written for another library.
        """
        if self.data is not None:
            return {
                name: self.data.get(name) for name in ("base_model", "datasets", "eval_results")
            }
        started = [params.get("init_from"), params.get("model")]
        if params.get("pretrained"):
            started.append(f"{params.get('model')}/{params['pretrained']}")
        names = [*self.base_models, *(str(name) for name in started if name)]
        repositories = dict.fromkeys(repo for name in names for repo in repositories_of(name))
        data_sets = dict.fromkeys(_DATA_SET.findall(str(params.get("train_data") or "")))
        return {
            "base_model": [*repositories] or None,
            "datasets": [*data_sets] or None,
            "eval_results": scores or None,
        }


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
        metrics = read_results(file).get(epoch, {}) | _chances(checkpoint, epoch)
    when = f"after epoch {epoch}" + (f" of {params['epochs']}" if params.get("epochs") else "")
    origin = f"An open_clip training checkpoint{f', {when}' if epoch is not None else ''}."
    card = ModelCard(spec, weights, origin, **facts, metrics=metrics, **options)
    with reading(f"the params.txt of {checkpoint}", "mend it, or move it away and name the model"):
        card.text()
    return card


def run_facts(checkpoint: Path) -> dict[str, Any]:
    """Read `params`, `given` and `sizes` of a card from the `params.txt` and the record of a checkpoint's run."""
    begin = [{}, *_record_of(checkpoint).get("start", [])][-1]
    settings = begin.get("settings")
    params = (settings or {}) | read_params(checkpoint)
    return {"params": params, "given": settings, "sizes": begin.get("sources") or {}}


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
        origin = f"Made from {public_name(spec.name)}, a model of open_clip."
        return ModelCard(spec, weights, origin, base_models=[str(folder)], **options)
    body = parts[3].rstrip("\n")
    return ModelCard(
        spec, weights, parts[2], title=parts[1], body=body, data=_data_of(folder), **options
    )


def read_results(file: Path) -> dict[int, dict[str, float]]:
    """Read epoch -> its metrics from a run's results.

    Of two with the same name the later.

    Returns:
        {} without a file.
    """
    results: dict[int, dict[str, float]] = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with reading(file, f"mend or remove line {number}"):
            row = json.loads(line)
            epoch = row.pop("epoch", None)  # absent where open_clip has only its zero-shot metrics
        scores = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        scores.pop("num_samples", None)
        if epoch is not None:
            results.setdefault(epoch, {}).update(scores)
    return results


def public_name(name: str) -> str:
    """Return a model's name without the folders above it.

    For a checkpoint the names of its run and its file.
    """
    path = Path(name.removeprefix(LOCAL_DIR))
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if name.startswith(LOCAL_DIR) or path.exists() else name


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
        whole = Batching(batch, steps, ranks).effective_batch
        sizes = f"{whole:,} = {batch} a micro-batch x {steps} accumulated x {ranks} ranks"
        facts.append(("effective batch", sizes))
    known = params if given is None else given
    for name in sorted(set(known) - _ELSEWHERE):
        value = params.get(name)
        if value is not None and value is not False and value not in ("", (), [], {}):
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
            name = Path(re.sub(r"/[^/]*(\{.*|\.\w+)$", "", entry)).name
        weight = f", weight {factors[i]}" if i < len(factors) and factors[i] else ""
        samples = f", {sizes[name]:,} samples" if name in sizes else ""
        lines += [f"{name}{samples}{weight}"] if entry else []
    return lines
