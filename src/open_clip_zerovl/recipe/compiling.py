"""torch.compile in a step of the recipe: blocks compiled one by one, and settings under which both passes draw the same masks.

dynamo makes a graph of a function for each form in which it is called: with and without gradients, per width, for one and for
any number of tokens. At its limit it runs the function eagerly in a new form and keeps the graphs that it has. A step whose
first pass has a graph and whose replay has none would draw other masks in the replay, since generated and eager code draw
them in other orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.model import is_compiled

# Graphs of one function. The blocks of all towers of a kind share theirs: docs/dga.md counts those of the recipe.
RECOMPILE_LIMIT = 64
_LISTS = (nn.ModuleList, nn.Sequential)


@contextmanager
def same_masks(model: nn.Module, *, cut_texts: bool) -> Iterator[None]:
    """Set torch within the block such that both passes of a step draw the same masks.

    Args:
        cut_texts: micro-batches have texts of other lengths.

    Raises:
        UserError: a function of a compiled model needs more than RECOMPILE_LIMIT graphs.
    """
    with ExitStack() as settings:
        if is_compiled(model):
            settings.enter_context(_enough_graphs())
        if cut_texts and torch.backends.cuda.cudnn_sdp_enabled():
            # torch 2.11 and later prefer cuDNN's attention on an H100. It plans each new length anew, and NaN gradients of
            # masked lengths are reported (pytorch#196678).
            torch.backends.cuda.enable_cudnn_sdp(False)
            settings.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        yield


@contextmanager
def _enough_graphs() -> Iterator[None]:
    import torch._dynamo
    import torch._inductor.config as inductor

    with (
        _patched(
            torch._dynamo.config,
            recompile_limit=RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            # their names before torch 2.7
            cache_size_limit=RECOMPILE_LIMIT,
            fail_on_cache_limit_hit=True,
        ),
        # In torch 2.13 and 2.14 masks on a GPU depend on the form of the kernel that draws them (pytorch#198333).
        _patched(inductor, align_random_eager=True),
    ):
        try:
            yield
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise UserError(
                f"torch.compile needs more than {RECOMPILE_LIMIT} graphs of one function of the model, whose inputs have "
                "another form in many steps; leave --torchcompile out (TORCH_LOGS=recompiles names the reasons)"
            ) from error


def _patched(config: Any, **values: Any) -> Any:
    """Set those values of a config of torch that its release has."""
    return config.patch({name: value for name, value in values.items() if hasattr(config, name)})


def compile_blocks(model: nn.Module) -> int:
    """Replace each block of a model's towers by its compiled form.

    Equal blocks share their graphs, so that the first step comes soon.

    A block is a module of a list whose modules are all of one class, such as the layers of a transformer.

    Returns:
        The number of compiled blocks; 0 for a model without such a list, of which nothing is compiled.
    """
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and _is_list_of_blocks(module):
            blocks += module.children()
            inside.update(module.modules())
    for block in blocks:
        block.compile()
    return len(blocks)


def _is_list_of_blocks(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children()}
    return (
        isinstance(module, _LISTS)
        and len(kinds) == 1
        and not issubclass(kinds.pop(), _LISTS)
        and all(any(child.children()) for child in module)
    )
