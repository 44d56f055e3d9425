"""Export: a training checkpoint as a `local-dir:` folder that open_clip opens without this package.

A model with ModernBERT is the exception: open_clip 3.3 needs this package's import to build it (`loading_notes`).

    open_clip_config.json         model_cfg (complete) and preprocess_cfg
    open_clip_model.safetensors   the weights, under open_clip's own names
    config.json                   of the Hugging Face text tower, where the model has one
    tokenizer.json ...            its tokenizer; a model with CLIP's own BPE needs none, open_clip brings it
    README.md                     the model card: how to load it, recipe, sources, metrics (`card`)

open_clip looks for the tokenizer in the folder, but for the text tower at `text_cfg.hf_model_name`. The export writes its
absolute path there; `zerovl export FOLDER --here` writes it anew after a move (`configs.write_paths_here`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from safetensors.torch import save_file
from torch import Tensor

from open_clip_zerovl.checkpoints.card import CARD_FILE, FOLDER_HERE, MOVED, ModelCard, run_card
from open_clip_zerovl.checkpoints.loading import ModelSpec, assemble, read_model_spec, write_config
from open_clip_zerovl.checkpoints.weights import WEIGHTS_FILE, read_state_dict
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, scratch_folder
from open_clip_zerovl.models.configs import (
    CONFIG_FILE,
    LOCAL_DIR,
    no_code_from_data,
    read_config,
)
from open_clip_zerovl.models.text_towers import import_note, is_registered_here

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REPLACED = "replaced"  # an earlier export, until the new one has its place
# Texts on which the run's tokenizer and the exported one are compared: case, accents, another script, too many words.
PROBE_TEXTS = ["A photo of a cat.", "Ünïcode café naïve", "猫 кот", "one two three " * 40]


def export_local_dir(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    model: str | None = None,
    text_model: str | None = None,
    precision: str | None = None,
    licence: str | None = None,
    force: bool = False,
) -> Path:
    """Write a training checkpoint as a folder that stock open_clip loads, offline and without this package.

    `open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer("local-dir:FOLDER")`.

    The folder is first written beside its destination. Stock open_clip loads it there. Every tensor is compared with the
    checkpoint, and the tokens of some texts with the run's tokenizer. Then the folder is renamed to its destination.

    Args:
        checkpoint: open_clip's `epoch_N.pt`. Beside it, `params.txt` and `results.jsonl` fill the model card.
        out_dir: the folder to make.
        model, text_model: see `read_model_spec`; by default from the run's `params.txt`.
        precision: `fp32`, `fp16` or `bf16` for the stored weights; None keeps the checkpoint's.
        licence: for the model card, as a hub names it (`mit`, `cc-by-4.0`).
        force: replaces an earlier export in `out_dir`. A folder that is not an export is never changed.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: a checkpoint that cannot be read or belongs to another model, an unknown model, a missing text tower,
            a destination that holds something else.
    """
    checkpoint = Path(checkpoint)
    check_destination(absolute(out_dir), force)
    log.info("reading %s", checkpoint)
    weights = read_state_dict(checkpoint)
    spec = read_model_spec(checkpoint, model=model, text_model=text_model)
    card = run_card(checkpoint, spec, weights, licence=licence)
    return write_local_dir(
        checkpoint, weights, spec, out_dir, card=card, precision=precision, force=force
    )


@no_code_from_data()
def write_local_dir(
    origin: str | os.PathLike[str],
    weights: dict[str, Tensor],
    spec: ModelSpec,
    out_dir: str | os.PathLike[str],
    *,
    card: ModelCard,
    precision: str | None = None,
    force: bool = False,
    extra_files: Mapping[str, bytes | str] | None = None,
) -> Path:
    """Write the folder of `export_local_dir` from weights under open_clip's names and a description of their model.

    Args:
        origin: the weights' source, for messages.
        card: the model card.
        extra_files: further files of the folder, name -> content.

    Raises:
        UserError: as `export_local_dir`.
    """
    final = absolute(out_dir)
    check_destination(final, force)
    log.info("building %s and comparing its tensors with the checkpoint's", spec.name)
    built, tokenizer = assemble(Path(origin), spec, weights)
    dtype = None if precision is None else PRECISIONS[precision]
    weights = {name: stored_as(name, tensor, dtype) for name, tensor in weights.items()}
    log.info("writing %.0f MB of weights", sum(tensor.nbytes for tensor in weights.values()) / 1e6)
    with new_folder(final) as folder:
        save_weights(weights, folder / WEIGHTS_FILE)
        if spec.text_source is not None:
            built.text.config.save_pretrained(folder)
        if isinstance(tokenizer, HFTokenizer):
            tokenizer.save_pretrained(folder)
            _name_tokenizer_for_both(folder / "tokenizer_config.json")
        preprocess_cfg = built.visual.preprocess_cfg
        write_config(folder, _pointing_at(folder, spec), preprocess_cfg)
        log.info("loading the folder with open_clip and comparing every tensor")
        _verify(folder, weights, tokenizer, spec)
        write_config(folder, _pointing_at(final, spec), preprocess_cfg)
        text = card.text(needs_import=is_registered_here(built))
        for name, content in {CARD_FILE: text, **(extra_files or {})}.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    log.info("wrote %s", final)
    return final


def loading_notes(folder: str | os.PathLike[str], *, moved: bool = True) -> list[str]:
    """Write the sentences for the person who loads an exported folder: the import before it, and the remedy after it was
    `moved`.
    """
    tower = Path(folder) / "config.json"  # of a Hugging Face text tower
    kind = (
        json.loads(tower.read_text(encoding="utf-8")).get("model_type") if tower.is_file() else None
    )
    text_cfg = read_config(Path(folder))["model_cfg"]["text_cfg"]
    needed = import_note(kind, text_cfg.get("hf_pooler_type"))
    notes = [] if needed is None else [needed]
    if moved and text_cfg.get("hf_model_name"):
        notes.append(
            "open_clip looks for its text tower at this path: after a move, `zerovl export FOLDER --here` writes the new one."
        )
    return notes


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Make a folder that takes the name and place of `final` when the block ends without an error.

    Else nothing is left.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for earlier in final.parent.glob(f".{glob.escape(final.name)}.*/{REPLACED}"):
        if not final.exists():  # a process was killed between the two renames below
            os.rename(earlier, final)
    with scratch_folder(final.parent, f".{final.name}.") as workshop:
        folder = workshop / final.name
        folder.mkdir()
        yield folder
        if final.exists():
            # The old folder is kept until the new one is complete; it is deleted with the temporary folder.
            os.rename(final, workshop / REPLACED)
        os.rename(folder, final)


def absolute(folder: str | os.PathLike[str]) -> Path:
    """Return the full path of a folder to write."""
    return Path(os.path.abspath(Path(folder).expanduser()))


def _is_export(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def save_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file."""
    file.touch()
    mode = file.stat().st_mode  # safetensors makes files that only their owner may read
    # Cloned, since safetensors refuses shared storage (tied weights) and a memory-mapped checkpoint should not stay open.
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    file.chmod(mode)


def stored_as(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a weight to the dtype of the stored file (None: its own).

    Raises:
        UserError: a finite one is too large for it.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor
    stored = tensor.to(dtype)
    if bool(tensor.isfinite().all()) and not bool(stored.isfinite().all()):
        raise UserError(
            f"'{name}' has values up to {tensor.abs().max():.3g}, too large for {dtype}: leave --fp16 out"
        )
    return stored


def check_destination(
    final: Path,
    force: bool,
    *,
    is_export: Callable[[Path], bool] = _is_export,
    kind: str = "export",
) -> None:
    """Refuse a folder that cannot be written or exists.

    `force` allows it to replace an earlier export.

    Args:
        is_export: whether a folder holds an export of this kind.
        kind: its name in sentences.
    """
    check_writable(final.parent, folder=True)
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not final.is_dir() or not is_export(final):
        raise UserError(f"{final} exists and is not an earlier {kind}: choose another folder")
    if not force:
        raise UserError(
            f"{final} already holds an export: choose another folder, or replace it with --force"
        )


def _pointing_at(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    model_cfg = deepcopy(spec.model_cfg)
    if spec.text_source is not None:
        model_cfg["text_cfg"]["hf_model_name"] = str(folder)
    if spec.tokenizer_source is not None:
        model_cfg["text_cfg"]["hf_tokenizer_name"] = str(folder)
    return model_cfg


def _name_tokenizer_for_both(file: Path) -> None:
    """Replace the class name that transformers 5 writes for a tokenizer without a class of its own by one that 4 knows, too."""
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _verify(
    folder: Path,
    weights: dict[str, Tensor],
    tokenizer: HFTokenizer | SimpleTokenizer,
    spec: ModelSpec,
) -> None:
    """Load the folder with stock open_clip and compare tensors and tokens.

    Raises:
        UserError: they differ.
    """
    name = LOCAL_DIR + str(folder)
    model, _, _ = open_clip.create_model_and_transforms(name)
    for key, tensor in model.state_dict().items():
        if not torch.equal(tensor, weights[key].to(tensor.dtype)):
            if not bool(tensor.isfinite().all()):
                raise UserError(
                    f"'{key}' of {spec.name} holds NaN or infinite numbers: its training has diverged; export an earlier "
                    "checkpoint"
                )
            raise UserError(
                f"the export of {spec.name} does not give back '{key}' as the checkpoint holds it"
            )
    exported_tokenizer = open_clip.get_tokenizer(name)
    for text in PROBE_TEXTS:
        if not torch.equal(exported_tokenizer([text]), tokenizer([text])):
            raise UserError(
                f"the exported tokenizer of {spec.name} reads '{text[:20]}' differently from the run's"
            )


# ---------------------------------------------------------------------------------------------------------------------
# A folder on a hub. All files go up in one commit, so that a push that is cut off leaves the repository as it was.
#
# Two files differ from the folder's: the card loads the model by the repository's name, and `hf_model_name` and
# `hf_tokenizer_name` of open_clip's config name the repository, which holds the text tower's config, in place of a folder here.
# ---------------------------------------------------------------------------------------------------------------------


def check_hub(repo: str) -> None:
    """Check a push before the work: the name, the token, whether the hub answers, and the right to write.

    Raises:
        UserError: the token may only read.
        OSError, ValueError: huggingface_hub's own, without a token, for another name, or if the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    known = HfApi().whoami()
    if ((known.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise UserError(
            f"the hub's token of {known.get('name')} may only read, so {repo} cannot be written: make one with the right to "
            "write at the hub's settings, and give it by HF_TOKEN or `hf auth login`"
        )


def push_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Push an exported folder to a repository in one commit.

    The repository is made if it is missing.

    Files of the repository that the folder does not have are kept. A card that is there is replaced (its history keeps it).

    Args:
        folder: written by `export_local_dir` or `export_transformers`.
        repo: NAMESPACE/NAME, or a name alone for the token's owner.
        private: for a repository that is made.

    Returns:
        The address of the commit.

    Raises:
        OSError: the push failed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    name = hub.create_repo(repo, private=private, exist_ok=True).repo_id
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    changed = _for_repository(folder, name)
    operations = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=changed.get(file, str(path)))
        for file, path in files.items()
    ]
    commit = hub.create_commit(name, operations, commit_message=f"Add {folder.name}")
    return str(commit.commit_url)


def _for_repository(folder: Path, repo: str) -> dict[str, bytes]:
    """List the files with another content in the repository than in the folder."""
    changed = {}
    if (folder / CARD_FILE).is_file():
        card = (folder / CARD_FILE).read_text(encoding="utf-8").replace(f"\n{MOVED}\n", "")
        card = card.replace(LOCAL_DIR + FOLDER_HERE, f"hf-hub:{repo}").replace(FOLDER_HERE, repo)
        changed[CARD_FILE] = card.encode()
    if (folder / CONFIG_FILE).is_file():
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        text_cfg = config["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text_cfg.get(key):
                text_cfg[key] = repo
        changed[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()
    return changed
