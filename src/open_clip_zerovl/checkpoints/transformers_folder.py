"""Export for transformers: a folder that `AutoModel` and `AutoProcessor` load without open_clip and without this package.

    config.json                CLIPModel for CLIP's own architecture, else VisionTextDualEncoderModel (transformers_towers.py)
    model.safetensors          the weights, under transformers' names
    preprocessor_config.json   the checkpoint's evaluation transform, as a CLIPImageProcessor
    tokenizer.json ...         its tokenizer, cutting texts at the model's context length where `truncation=True`
    README.md                  the model card

transformers 4.45 and later read it. Before the folder gets its name, transformers loads it, and its embeddings are compared
with open_clip's to 1e-5, its tokens with the run's, its pixels with the transform's.

How near the pixels come: with PIL (transformers 4, or `backend="pil"` in 5) equal; with torchvision, 5's default, 2 / 255 at
most, and other than equal in less than 2 % of the values. Where a resized picture loses an odd number of pixels to the crop,
transformers may cut it one pixel beside open_clip.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image
from torch import Tensor

from open_clip_zerovl.checkpoints.card import CARD_FILE, ModelCard, folder_card, run_card
from open_clip_zerovl.checkpoints.export import (
    PRECISIONS,
    PROBE_TEXTS,
    absolute,
    check_destination,
    new_folder,
    save_weights,
    stored_as,
)
from open_clip_zerovl.checkpoints.loading import evaluation_transform, load_model, spec_of
from open_clip_zerovl.checkpoints.transformers_towers import image_tower, refuse, text_tower
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.models.configs import LOCAL_DIR, ClipModel, no_code_from_data

log = logging.getLogger(__name__)

TOLERANCE = 1e-5  # largest difference of an entry of a normalised embedding
PIXEL_TOLERANCE = 2.5 / 255  # largest difference of a pixel's value, before it is normalised
INFERENCE_ONLY = (
    "transformers' dual encoder has no text tower that gives the first token's state itself, so a pooler passes it on, and the "
    "first step of an optimizer would destroy it. To train the model further, take the export for open_clip; an "
    "hf: image tower has none."
)
WEIGHTS = "model.safetensors"
MODEL_TYPES = ("clip", "vision-text-dual-encoder")
# Entries of a tokenizer's file on the way in which the tokenizer was loaded.
_OF_THIS_MACHINE = ("is_local", "local_files_only", "name_or_path")
_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # PIL's numbers


@no_code_from_data()
def export_transformers(
    source: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    model: str | None = None,
    text_model: str | None = None,
    precision: str | None = None,
    licence: str | None = None,
    force: bool = False,
) -> Path:
    """Write a checkpoint as a folder for transformers: `AutoModel.from_pretrained(FOLDER)` and `AutoProcessor`.

    Args:
        source: as for `load_model`: `epoch_N.pt`, a folder that `zerovl export` wrote for open_clip, or
            open_clip's `NAME/TAG`.
        out_dir: the folder to make.
        model, text_model: see `read_model_spec`; by default from the run's `params.txt`.
        precision: `fp32`, `fp16` or `bf16` for the stored weights; they are loaded as float32. None keeps float32.
        licence: for the card, as a hub names it (`mit`, `cc-by-4.0`).
        force: replaces an earlier export for transformers in `out_dir`.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: as `export_local_dir`; a model with a part that transformers cannot represent; the message names it.
    """
    final = absolute(out_dir)
    check_destination(
        final, force, is_export=is_transformers_folder, kind="export for transformers"
    )
    log.info("reading %s", source)
    given: dict[str, Any] = {"model_name": model, "text_model": text_model}
    whole, _, tokenizer = load_model(source, **given)
    path = Path(os.fspath(source).removeprefix(LOCAL_DIR)).expanduser()
    card_of = run_card if path.is_file() else folder_card
    facts = spec_of(source, **given), whole.state_dict()
    card = card_of(path, *facts, library="transformers", licence=licence)
    return write_transformers(whole.float(), tokenizer, final, card, precision=precision)


def write_transformers(
    model: ClipModel, tokenizer: Any, final: Path, card: ModelCard, *, precision: str | None = None
) -> Path:
    """Write the folder of `export_transformers` from a model in memory, in eval mode.

    Raises:
        UserError: as there.
    """
    config, tensors, trainable = whole_model(model)
    log.info("writing %.0f MB of weights", sum(tensor.nbytes for tensor in tensors.values()) / 1e6)
    with new_folder(final) as folder:
        _save_processor(folder, model, tokenizer, config.model_type)
        config.save_pretrained(folder)
        save_weights(
            {name: stored_as(name, tensor, torch.float32) for name, tensor in tensors.items()},
            folder / WEIGHTS,
        )
        log.info("loading the folder with transformers and comparing embeddings, tokens and pixels")
        _verify(folder, model, tokenizer)
        if precision is not None:
            dtype = PRECISIONS[precision]
            save_weights(
                {name: stored_as(name, tensor, dtype) for name, tensor in tensors.items()},
                folder / WEIGHTS,
            )
        (folder / CARD_FILE).write_text(card.text(trainable=trainable), encoding="utf-8")
    log.info("wrote %s", final)
    if not trainable:
        log.warning("%s is for inference only: %s", final, INFERENCE_ONLY)
    return final


def is_transformers_folder(folder: Path) -> bool:
    """Return whether a folder is an export of `export_transformers`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    whole = all(
        (folder / name).is_file() for name in (WEIGHTS, "preprocessor_config.json", CARD_FILE)
    )
    return whole and isinstance(config, dict) and config.get("model_type") in MODEL_TYPES


def whole_model(model: ClipModel) -> tuple[Any, dict[str, Tensor], bool]:
    """Build the config and the state dict of the whole model in transformers, and say whether it can be trained there.

    Raises:
        UserError: transformers has no place for a part of the model.
    """
    from transformers import CLIPConfig, VisionTextDualEncoderConfig

    if getattr(model, "logit_bias", None) is not None:
        refuse("it has a logit_bias (SigLIP), and transformers' dual encoders have none")
    try:
        image, text = image_tower(model), text_tower(model)
    except (
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # it lacks a part that `TransformersTower` needs
        refuse(f"its towers have other parts ({first_line(error)})")
    towers = {"vision_config": image.config.to_dict(), "text_config": text.config.to_dict()}
    scale = model.logit_scale.detach().float().reshape(())
    rest: dict[str, Any] = {
        "projection_dim": len(image.projection),
        "logit_scale_init_value": scale.item(),
    }
    if text.config.model_type == "clip_text_model":
        if image.config.model_type != "clip_vision_model":
            refuse(
                "its image tower is not CLIP's, with a norm before the first layer (ln_pre), beside CLIP's text tower"
            )
        config, prefixes = CLIPConfig(**towers, **rest), ("", "")
        config.architectures = ["CLIPModel"]
    else:
        config = VisionTextDualEncoderConfig(**towers, **rest)
        prefixes = ("vision_model.", "text_model.")
        config.architectures = ["VisionTextDualEncoderModel"]
    tensors = {f"{prefixes[0]}{name}": tensor for name, tensor in image.tensors.items()}
    tensors |= {f"{prefixes[1]}{name}": tensor for name, tensor in text.tensors.items()}
    tensors |= {
        "visual_projection.weight": image.projection,
        "text_projection.weight": text.projection,
    }
    return config, tensors | {"logit_scale": scale}, image.trainable and text.trainable


# --- the processor ---------------------------------------------------------------------------------------------------


def image_processor(preprocess_cfg: Mapping[str, Any]) -> Any:
    """Convert open_clip's evaluation transform to transformers' CLIPImageProcessor.

    Raises:
        UserError: resize mode `longest`, which pads, or images that are not square.
    """
    from transformers import CLIPImageProcessor

    size, mode = preprocess_cfg["size"], preprocess_cfg["resize_mode"]
    height, width = (size, size) if isinstance(size, int) else size
    if mode not in ("shortest", "squash"):
        refuse(f"its transform resizes the {mode} side and pads (image_resize_mode '{mode}')")
    if height != width and mode == "shortest":
        refuse(f"its transform crops to {height} x {width} px, and transformers' to a square")
    return CLIPImageProcessor(
        do_convert_rgb=True,
        do_resize=True,
        size={"shortest_edge": height}
        if mode == "shortest"
        else {"height": height, "width": width},
        resample=_RESAMPLE.get(preprocess_cfg["interpolation"], _RESAMPLE["bicubic"]),
        do_center_crop=mode == "shortest",
        crop_size={"height": height, "width": width},
        do_rescale=True,
        do_normalize=True,
        image_mean=list(preprocess_cfg["mean"]),
        image_std=list(preprocess_cfg["std"]),
    )


def preprocess_of(processor: Any) -> dict[str, Any]:
    """Convert an image processor of transformers to open_clip's preprocess_cfg, which shows the whole picture without a margin
    cut off.

    Raises:
        UserError: it does not scale and normalise pictures, or resizes in a way that open_clip does not know.
    """
    given = processor.to_dict()
    resized, cropped = (
        {key: side for key, side in dict(given.get(name) or {}).items() if side}
        for name in ("size", "crop_size")
    )
    crop = given.get("do_center_crop")
    size = cropped if crop else resized
    interpolation = {number: name for name, number in _RESAMPLE.items()}.get(given.get("resample"))
    steps = given.get("do_resize", True) and given.get("do_rescale") and given.get("do_normalize")
    scaled = abs(given.get("rescale_factor", 1 / 255) * 255 - 1) < 1e-6
    # A shortest edge without a crop keeps the picture's proportions, and open_clip's towers have one size.
    sized = {"height", "width"} <= {*size} and (not crop or "shortest_edge" in resized)
    if interpolation is None or not (steps and scaled and sized):
        raise UserError(
            f"{type(processor).__name__} does not resize bilinearly or bicubically to one size, scale by 1/255 and normalise, "
            "as open_clip does; give a model whose processor does"
        )
    return {
        "size": [size["height"], size["width"]],
        "mean": list(given["image_mean"]),
        "std": list(given["image_std"]),
        "mode": "RGB",
        "interpolation": interpolation,
        "resize_mode": "shortest" if crop else "squash",
    }


def _save_processor(folder: Path, model: ClipModel, tokenizer: Any, model_type: str) -> None:
    """Save image processor and tokenizer in the files that transformers 4 and 5 read."""
    processor_class = "CLIPProcessor" if model_type == "clip" else "VisionTextDualEncoderProcessor"
    image_processor(model.visual.preprocess_cfg).save_pretrained(folder)
    words = (
        _clip_tokenizer()
        if isinstance(tokenizer, SimpleTokenizer)
        else copy.deepcopy(tokenizer.tokenizer)
    )
    words.model_max_length = tokenizer.context_length
    words.save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings = {key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE}
        settings["processor_class"] = processor_class
        (folder / name).write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _clip_tokenizer() -> Any:
    """Read CLIP's byte pair encoding from the file that open_clip brings."""
    from transformers import CLIPTokenizer

    open_clip_tokenizer = SimpleTokenizer()
    # transformers' for them
    names = dict(
        zip(open_clip_tokenizer.all_special_ids, ("<|startoftext|>", "<|endoftext|>"), strict=True)
    )
    vocabulary = {
        names.get(number, word): number for word, number in open_clip_tokenizer.encoder.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "vocab.json").write_text(
            json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8"
        )
        merges = "".join(f"{first} {second}\n" for first, second in open_clip_tokenizer.bpe_ranks)
        Path(scratch, "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
        return CLIPTokenizer.from_pretrained(scratch)


# --- the check -------------------------------------------------------------------------------------------------------


def _verify(folder: Path, model: ClipModel, tokenizer: Any) -> None:
    """Load the folder with transformers and compare it with the model.

    Raises:
        UserError: they differ.
    """
    from transformers import AutoModel, AutoProcessor

    loaded = AutoModel.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    texts = processor(
        text=PROBE_TEXTS,
        padding="max_length",
        truncation=True,
        max_length=tokenizer.context_length,
        return_tensors="pt",
    )
    tokens = tokenizer(PROBE_TEXTS)
    used = texts["attention_mask"].bool()
    for text, ours, theirs, used_here in zip(
        PROBE_TEXTS, tokens, texts["input_ids"], used, strict=True
    ):
        if not torch.equal(ours[used_here], theirs[used_here]):
            refuse(f"its tokenizer reads '{text[:20]}' in another way")
    # Three times as wide as high: two sides are cut off, an even number of pixels, where both libraries cut alike.
    pictures = [_probe_picture(100, 300), _probe_picture(300, 100)]
    transform = evaluation_transform(model)
    ours = torch.stack([transform(picture) for picture in pictures])
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    deviation = torch.tensor(model.visual.preprocess_cfg["std"]).reshape(-1, 1, 1)
    if not ((ours - pixels).abs() * deviation).max() <= PIXEL_TOLERANCE:
        refuse("its transform gives other pixels")
    with torch.no_grad():
        output = loaded.float().eval()(**texts, pixel_values=ours)
        expected = {"image": model.encode_image(ours), "text": model.encode_text(tokens)}
    for tower, features in expected.items():
        found_features = output.image_embeds if tower == "image" else output.text_embeds
        difference = (F.normalize(features.float(), dim=-1) - found_features).abs().max().item()
        if not difference <= TOLERANCE:
            refuse(
                f"its {tower} tower computes something else ({difference:.1e} between entries of normalised embeddings)"
            )


def _probe_picture(height: int, width: int) -> Image.Image:
    """Draw a smooth picture with four sides that differ."""
    rows, columns = torch.meshgrid(
        torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij"
    )
    planes = torch.stack([rows, columns, (rows * 9).sin() * (columns * 7).cos() / 2 + 0.5], dim=-1)
    return Image.fromarray((planes * 255).round().to(torch.uint8).numpy())
