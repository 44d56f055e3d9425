"""The README.md of an exported folder: how to load the model, what it is, how it was trained, what was measured.

It holds only what was read from the run's `params.txt`, from the `results.jsonl` that open_clip writes beside the checkpoints,
and from the model's config. The licence is what the model's owner gives; without one the card names none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.checkpoints.spec import ModelSpec, read_params
from open_clip_zerovl.checkpoints.weights import read_epoch
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.text_towers import IMPORT_LINE

CARD_FILE = "README.md"
FOLDER_HERE = "/path/to/this/folder"  # in the lines that load the model; `hub` writes the repository's name there

# Arguments in params.txt that belong to the recipe, with their labels, in the card's order. A falsy value means "not used".
_RECIPE = (
    ("epochs", "epochs"),
    ("train_num_samples", "samples an epoch"),
    ("lr", "learning rate"),
    ("lr_min", "learning rate, floor"),
    ("lr_scheduler", "schedule"),
    ("warmup", "warm-up steps"),
    ("warmup_share", "warm-up, share of all steps"),
    ("wd", "weight decay"),
    ("beta1", "AdamW beta1"),
    ("beta2", "AdamW beta2"),
    ("eps", "AdamW epsilon"),
    ("grad_clip_norm", "gradient clipping"),
    ("precision", "precision"),
    ("sampling", "sampling of sources"),
    ("coin_flip_mixup", "coin flipping mixup"),
    ("mixup_alpha", "mixup alpha"),
    ("text_augment", "share of words augmented"),
    ("auto_augment", "AutoAugment policy"),
    ("token_drop", "share of image tokens dropped"),
    ("force_patch_dropout", "share of image tokens dropped"),
    ("freeze", "frozen towers"),
    ("init_from", "started from checkpoint"),
    ("init_image", "image tower started from"),
    ("init_text", "text tower started from"),
    ("pretrained", "started from tag"),
    ("pretrained_image", "image tower pretrained"),
    ("seed", "seed"),
)
# Their values are paths on the training machine: the card has the file's name only.
_PATHS = frozenset({"init_from", "init_image", "init_text"})
_MODEL = "## Model"  # the heading from which on a card speaks of the model alone
_RECALL = re.compile(r"(?:(.+)_)?(image_to_text|text_to_image)_R@(\d+)")


# How a model is loaded by the library that its folder is for: the sentence after its origin, and the lines.
_LOADING = {
    "open_clip": (
        "It loads in stock [open_clip](https://github.com/mlfoundations/open_clip):",
        "import open_clip\n\n"
        f'model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{FOLDER_HERE}")\n'
        f'tokenizer = open_clip.get_tokenizer("local-dir:{FOLDER_HERE}")',
    ),
    "transformers": (
        "It loads in [transformers](https://github.com/huggingface/transformers), 4.45 and later:",
        "from transformers import AutoModel, AutoProcessor\n\n"
        f'model = AutoModel.from_pretrained("{FOLDER_HERE}")\n'
        f'processor = AutoProcessor.from_pretrained("{FOLDER_HERE}")\n'
        'inputs = processor(text=texts, images=images, padding=True, truncation=True, return_tensors="pt")\n'
        "output = model(**inputs)  # image_embeds and text_embeds of length 1, logits_per_image",
    ),
}


def run_card(
    checkpoint: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    *,
    library: str = "open_clip",
    licence: str | None = None,
) -> str:
    """The card of a training checkpoint, with the metrics of its own epoch. Arguments as `model_card`.

    Raises:
        UserError: `results.jsonl` beside the checkpoint is not JSON, or `params.txt` holds a value that no training writes.
    """
    params = read_params(checkpoint)
    epoch = read_epoch(checkpoint)
    metrics = read_results(checkpoint.parent / "results.jsonl", epoch) if epoch is not None else {}
    when = f"after epoch {epoch}" + (f" of {params['epochs']}" if params.get("epochs") else "")
    origin = f"An open_clip training checkpoint{f', {when}' if epoch is not None else ''}."
    try:
        return model_card(
            spec, weights, origin=origin, params=params, metrics=metrics, library=library, licence=licence
        )
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(
            f"the params.txt of {checkpoint} holds a value that training does not write ({error}); mend it, or move it away "
            "and name the model"
        ) from error


def read_results(file: Path, epoch: int) -> dict[str, float]:
    """The metrics of an epoch in a run's results; of two with the same name the later. {} without a file."""
    metrics: dict[str, float] = {}
    if not file.is_file():
        return metrics
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number} is not JSON ({error}): mend or remove it") from error
        if isinstance(row, dict) and row.pop("epoch", None) == epoch:
            metrics.update({name: value for name, value in row.items() if isinstance(value, (int, float))})
    return metrics


def model_card(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    *,
    origin: str,
    params: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    library: str = "open_clip",
    licence: str | None = None,
) -> str:
    """The card as Markdown with the front matter that a hub reads.

    Args:
        origin: a sentence that says where the weights come from.
        params: arguments of the run, by name.
        metrics: by name: `SET_image_to_text_R@1` ... `SET_rsum` become a table, others a list.
        notes: sentences for the end.
        library: the one that the folder is for, of `open_clip` and `transformers`.
        licence: as a hub names it, such as `mit`.

    Raises:
        UserError: a licence that is no name.
    """
    parts = [
        *_head(f"# {_title(spec, params or {})}", origin, library, licence),
        _MODEL + "\n\n" + _list(_model_facts(spec, weights)),
    ]
    if params:
        parts.append("## Recipe\n\n" + _list(_recipe_facts(params)))
        parts.append("## Data\n\n" + _data(params))
    parts.append(
        "## Measured\n\n" + (_measured(metrics) if metrics else "No metrics were recorded with this checkpoint.")
    )
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def folder_card(
    folder: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    *,
    library: str = "open_clip",
    licence: str | None = None,
) -> str:
    """The card of an exported folder for another library: what its own card says of model, recipe, data and scores.

    Arguments as `model_card`. A folder without a card of ours has the facts of its model alone.

    Raises:
        UserError: as `model_card`.
    """
    file = folder / CARD_FILE
    own = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    top, found, rest = own.partition(f"\n{_MODEL}\n")
    title = next((line for line in top.splitlines() if line.startswith("# ")), None)
    if not found or title is None:
        return model_card(
            spec,
            weights,
            origin=f"Made from {_public(spec.name)}, a model of open_clip.",
            library=library,
            licence=licence,
        )
    return "\n\n".join([*_head(title, _origin(top), library, licence), f"{_MODEL}\n{rest}"])


def with_import(card: str) -> str:
    """`model_card`'s text for a model that open_clip 3.3 builds only after this package's import: with that line."""
    sentence, lines = _LOADING["open_clip"]
    card = card.replace(
        lines, lines.replace("import open_clip\n", f"import open_clip\n{IMPORT_LINE}  # its text tower\n")
    )
    return card.replace(
        sentence,
        sentence.replace("stock ", "").replace("):", "); the import of `open_clip_zerovl` registers its text tower:"),
    )


def _origin(top: str) -> str:
    """The first sentence of a card, which says where the weights come from."""
    lines = [line for line in top.splitlines() if " It loads in " in line]
    return lines[0].partition(" It loads in ")[0] if lines else ""


def _head(title: str, origin: str, library: str, licence: str | None) -> list[str]:
    """Front matter, title, and how to load the model."""
    if licence is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+_-]*", licence):
        raise UserError(
            f"the licence '{licence}' is no name as a hub takes it; give one such as mit, apache-2.0, cc-by-4.0"
        )
    front = [f"library_name: {library}", "pipeline_tag: zero-shot-image-classification"]
    front += [f"license: {licence}"] if licence else []
    sentence, lines = _LOADING[library]
    return [
        "\n".join(["---", *front, "tags:", "- clip", "- zerovl", "---"]),
        title,
        f"{origin} {sentence}".strip(),
        f"```python\n{lines}\n```",
    ]


def _title(spec: ModelSpec, params: Mapping[str, Any]) -> str:
    name = params.get("name")
    return f"{name} ({_public(spec.name)})" if name else _public(spec.name)


def _public(name: str) -> str:
    """The model's name without the path of a local folder."""
    return Path(name.partition(":")[2]).name if name.startswith("local-dir:") else name


def _model_facts(spec: ModelSpec, weights: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    vision, text = spec.model_cfg["vision_cfg"], spec.model_cfg["text_cfg"]
    image_tower = vision.get("timm_model_name") or (
        f"open_clip ViT, {vision.get('layers')} layers, width {vision.get('width')}, patch {vision.get('patch_size')}"
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
        facts.append(("temperature (1 / exp(logit_scale))", f"{1 / scale.double().exp().item():.5f}"))
    return facts


def _recipe_facts(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if batch := params.get("batch_size"):
        ranks, steps = params.get("world_size") or 1, params.get("dga_steps") or params.get("accum_freq") or 1
        sizes = f"{batch * ranks * steps:,} = {batch} a micro-batch x {steps} accumulated x {ranks} ranks"
        facts.append(("effective batch", sizes))
    for name, label in _RECIPE:
        value = params.get(name)
        if (
            value is None
            or value is False
            or value in ("", ())
            or (name == "mixup_alpha" and not params["coin_flip_mixup"])
        ):
            continue
        facts.append((label, Path(str(value)).name if name in _PATHS else str(value)))
    return facts


def _data(params: Mapping[str, Any]) -> str:
    train_data = params.get("train_data")
    if not train_data:
        return "The run named no training data."
    factors = str(params.get("train_data_upsampling_factors") or "").split("::")
    lines = []
    for i, entry in enumerate(str(train_data).split("::")):
        name, equals, _ = entry.partition("=")
        if not equals or "/" in name:
            # open_clip's unnamed data, shown by its folder's name: a folder, a file in one, or a pattern of shards in one.
            is_folder = "{" not in entry and not Path(entry).suffix
            folder = entry if is_folder else entry.partition("{")[0].rpartition("/")[0]
            name = Path(folder).name
        weight = f", weight {factors[i]}" if i < len(factors) and factors[i] else ""
        lines.append(f"- {name}{weight}")
    return "\n".join(lines)


def _measured(metrics: Mapping[str, float]) -> str:
    tables: dict[str, dict[tuple[str, int], float]] = {}
    others: list[tuple[str, str]] = []
    for name, value in metrics.items():
        if match := _RECALL.fullmatch(name):
            tables.setdefault(match[1] or "validation pairs", {})[match[2], int(match[3])] = value
        elif not name.endswith("rsum"):
            others.append((name, f"{value:.4f}"))
    lines = []
    if tables:
        ways = ("image_to_text", "text_to_image")
        ks = sorted({k for row in tables.values() for _, k in row})
        heads = [f"{'I2T' if way == ways[0] else 'T2I'} R@{k}" for way in ways for k in ks]
        lines += [f"| retrieval, zero-shot | {' | '.join(heads)} | RSUM |", "|---" + "|---:" * (len(heads) + 1) + "|"]
        for name, row in tables.items():
            cells = [f"{100 * row[way, k]:.1f}" if (way, k) in row else "" for way in ways for k in ks]
            total = 100 * sum(row.get((way, k), float("nan")) for way in ways for k in (1, 5, 10))
            lines.append(f"| {name} | {' | '.join(cells)} | {total:.1f} |")
    return "\n".join(lines) + ("\n\n" if lines and others else "") + _list(others)


def _list(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {label}: {value}" for label, value in facts)
