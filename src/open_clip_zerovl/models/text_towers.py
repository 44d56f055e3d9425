"""ModernBERT, MPNet, DistilBERT and decoders as Hugging Face text towers, which open_clip 3.3 does not build by itself.

open_clip finds a tower's attributes in `open_clip.hf_configs.arch_dict`, by the `model_type` of its config, and builds it with
`open_clip.hf_model.AutoModel`. Its release 3.3 has no entry for these, and asks each for `add_pooling_layer`, which
only MPNet's class takes. `register_text_towers` adds the entries and puts `TowerModel` in AutoModel's place there. Other towers
are built by the same calls as before. open_clip 4 has an entry for ModernBERT; the rest of `TowerModel` holds there, too.
The function also adds `LastTokenPooler` to open_clip's poolers, for decoders: only their last token has seen the whole text.

An export of such a model loads in open_clip 3.3 after `import open_clip_zerovl.models`, which registers it (`import_note`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel


def _entry(
    layers: str, embeddings: str = "embeddings", pooler: str = "mean_pooler"
) -> dict[str, Any]:
    return {
        "config_names": {
            "context_length": "max_position_embeddings",
            "vocab_size": "vocab_size",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "layers": "num_hidden_layers",
            "layer_attr": layers,
            "token_embeddings_attr": embeddings,
        },
        "pooler": pooler,
    }


LAST_TOKEN = "last_token_pooler"  # its name in `hf_pooler_type`
DECODERS = ("llama", "mistral", "qwen2", "qwen3")


#: `model_type` -> the entry of `arch_dict`, ModernBERT's as open_clip 4 has it, so that a config means the same on both lines.
TEXT_TOWERS: dict[str, dict[str, Any]] = {
    "modernbert": _entry("layers"),
    "mpnet": _entry("layer"),
    "distilbert": _entry("layer"),
    **dict.fromkeys(DECODERS, _entry("layers", "embed_tokens", LAST_TOKEN)),
}
_WITH_POOLER = (
    "mpnet",
)  # their classes take `add_pooling_layer`, so that open_clip's own call builds them
IMPORT_LINE = "import open_clip_zerovl.models"


def register_text_towers() -> None:
    """Make open_clip build the towers of TEXT_TOWERS.

    Calling it again changes nothing.

    transformers no longer reports weights that a tower leaves unused, such as a pooler's. It does report missing ones.
    Where open_clip has other names than expected nothing is changed, and `check_model` refuses the towers as before.
    """
    from open_clip import hf_configs, hf_model

    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_is_no_report_of_unused_weights)
    if getattr(hf_model, "AutoModel", None) not in (AutoModel, TowerModel) or not hasattr(
        hf_model, "register_pooler"
    ):
        return
    hf_model.AutoModel = TowerModel
    hf_model.register_pooler(LastTokenPooler)
    for kind, entry in TEXT_TOWERS.items():
        hf_configs.arch_dict.setdefault(kind, entry)


def _is_no_report_of_unused_weights(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "UNEXPECTED" not in text or "MISSING" in text or "MISMATCH" in text


def is_registered_here(model: nn.Module) -> bool:
    """Return whether an open_clip model has a text tower or pooler that open_clip 3.3 has only with this package."""
    text = getattr(model, "text", None)
    kind = getattr(getattr(text, "config", None), "model_type", None)
    return kind in TEXT_TOWERS or isinstance(getattr(text, "pooler", None), LastTokenPooler)


def import_note(model_type: str | None, pooler: str | None) -> str | None:
    """Write the sentence about the import that an export needs, by its text tower's `model_type` and `hf_pooler_type`.

    Returns:
        None where it needs none.
    """
    if model_type not in TEXT_TOWERS and pooler != LAST_TOKEN:
        return None
    return (
        f"open_clip 3.3 does not build this text tower ({model_type}) by itself: write '{IMPORT_LINE}' before the model is "
        "loaded."
    )


class LastTokenPooler(nn.Module):
    """The state of each text's last token, with padding on either side: open_clip's pooler `last_token_pooler`."""

    def forward(self, x: Any, attention_mask: Tensor) -> Tensor:
        """Pool a transformer's output with states (b, L, F) under a mask (b, L) to (b, F)."""
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(dim=1)
        return x.last_hidden_state[torch.arange(len(last), device=last.device), last]


class TowerModel(AutoModel):
    """transformers' AutoModel as open_clip calls it, with the settings that exact training needs for towers of TEXT_TOWERS.

    - No `add_pooling_layer`: they have no pooler.
    - torch's own attention: with another package for it, ModernBERT takes the padding out of a batch, for which the host waits
      for the GPU, and its kernels know no float32.
    - `reference_compile` off: transformers before 5.1 compiles ModernBERT's parts on a GPU in the first forward pass.
    - float32, in which open_clip builds its other towers, regardless of a config; `--precision` comes after.
    - Rotary frequencies stay in float32 where the model is cast. They are not in the checkpoint, so that a model trained with
      rounded frequencies would be evaluated with unrounded ones.
    """

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> nn.Module:
        """Build a tower as AutoModel does."""
        if config.model_type not in TEXT_TOWERS or config.model_type in _WITH_POOLER:
            return super().from_config(config, **options)
        return _prepared(super().from_config(config, **_without_pooler(options)))

    @classmethod
    def from_pretrained(cls, source: Any, *arguments: Any, **options: Any) -> nn.Module:
        """Load a tower as AutoModel does."""
        config = options.get("config") or AutoConfig.from_pretrained(source)
        if config.model_type not in TEXT_TOWERS or config.model_type in _WITH_POOLER:
            return super().from_pretrained(source, *arguments, **options)
        return _prepared(super().from_pretrained(source, *arguments, **_without_pooler(options)))


def _without_pooler(options: dict[str, Any]) -> dict[str, Any]:
    """Remove `add_pooling_layer` from the options unless a pooler is asked for.

    transformers then says that there is none.
    """
    others = {
        name: value for name, value in options.items() if name != "add_pooling_layer" or value
    }
    return {**others, "attn_implementation": "sdpa"}


def _prepared(tower: AutoModel) -> nn.Module:
    tower.config.reference_compile = False
    if hasattr(
        tower.config, "use_cache"
    ):  # of a decoder: keys and values for further tokens, which no text has
        tower.config.use_cache = False
    for module in tower.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            # On the instance, where nn.Module's casts of every parent find it. A partial is copied and pickled with its module.
            vars(module)["_apply"] = partial(_apply_but_keep_types, module)
    return tower.float()


def _apply_but_keep_types(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Run nn.Module._apply and give the module's own buffers the types that they had."""
    before = dict(module.named_buffers(recurse=False))
    type(module)._apply(module, change, recurse)
    for name, buffer in before.items():
        changed = module._buffers[name]
        if changed is not None and changed.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(changed.device)
    return module
