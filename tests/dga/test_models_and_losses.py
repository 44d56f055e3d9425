"""Decoupled gradient accumulation on models and losses that are not open_clip's, against one graph (fp64, 1e-10)."""

import copy
from importlib.metadata import version

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import nn
from transformers import (
    BatchEncoding,
    BertConfig,
    CLIPConfig,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
)

from open_clip_zerovl.core.memory import ieee_products, product_precision
from open_clip_zerovl.dga.model import on_device
from open_clip_zerovl.dga.replay import REPLAY_TOLERANCE, replay_tolerance
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.losses.gathering import Logits
from support import documented
from support.dga_reference import (
    CONTEXT,
    SEED,
    TOLERANCE,
    VOCABULARY,
    accumulated,
    batches,
    bert_clip,
    error,
    reference,
)
from support.two_towers import (
    FORMS,
    ImageImage,
    image_batches,
    seeded,
)

EXACT = TOLERANCE[torch.float64]


def values_of(side):
    """Return the tensors of one side of a micro-batch."""
    if isinstance(side, torch.Tensor):
        return [side]
    return [
        value
        for part in (dict(side).values() if hasattr(side, "keys") else side)
        for value in values_of(part)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_stays_where_the_caller_keeps_it(form):
    """A BatchEncoding's own `to` moves in place."""
    ids = torch.ones(2, CONTEXT, dtype=torch.long)
    given = FORMS[form][1](ids)
    moved = on_device(given, torch.device("meta"))
    assert type(moved) is type(given)
    places = [{value.device.type for value in values_of(side)} for side in (given, moved)]
    assert places == [{"cpu"}, {"meta"}]


def test_casts_that_have_no_graph_are_dropped_before_a_pass_that_has_one(monkeypatch):
    """In an autocast region of the caller its cache holds some (of torch 2.6 without the weights' gradients)."""
    model, micro_batches = bert_clip(torch.float32), batches([3, 2, 2], torch.float32)
    clear, calls = torch.clear_autocast_cache, []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append(None) or clear())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        accumulated(model, ContrastiveLoss(), micro_batches)
    # before each forward pass with graph and each backward pass, and by torch as the region ends
    assert len(calls) == 3 + 3 + 1


@pytest.mark.parametrize("fails_at", ["forward 0", "forward 2", "loss", "replay", "check"])
def test_after_a_failure_all_is_as_before(fails_at, one_rank):
    """Random state, buffers and DDP's synchronisation; the step that follows is exact."""
    model, micro_batches = seeded(ImageImage), image_batches([4, 3, 2])
    once = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    calls = [0]

    def prepare(images, texts):
        calls[0] += 1
        if {"forward 0": 1, "forward 2": 3, "replay": 5}.get(fails_at) == calls[0]:
            raise KeyboardInterrupt
        return images * (1 + torch.rand(1) + 0.1 * (fails_at == "check") * calls[0]), texts

    def loss(**values):
        if fails_at == "loss":
            torch.rand(1)
            raise KeyboardInterrupt
        return ClipLoss()(**values)

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(SEED)
    state = torch.get_rng_state()
    with pytest.raises((KeyboardInterrupt, ReplayError)):
        DecoupledGradientAccumulation(wrapped, loss, check="always").backward(
            micro_batches, prepare=prepare
        )
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert wrapped.require_backward_grad_sync
    model.zero_grad()
    once.load_state_dict(model.state_dict())
    _, wanted = reference(once, ClipLoss(), micro_batches)
    _, found = accumulated(wrapped, ClipLoss(), micro_batches)
    assert error(found, wanted) <= EXACT
    assert model.body[1].num_batches_tracked == 2 * 3


# ------------------------------------------------------------------------------------------------------- fp32 products


NEW_FLAGS = hasattr(torch.backends.mkldnn, "matmul")  # fp32_precision, of torch 2.9


@pytest.fixture
def fp32_flags():
    """torch's flags as they are at first, before and after."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        if NEW_FLAGS:
            for flags in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
                flags.fp32_precision = "none"

    reset()
    yield
    reset()


SETTINGS = {
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp32_precision of cuBLAS": lambda: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32"
    ),
    "fp32_precision of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}


def flags():
    found = []
    for read in (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_float32_matmul_precision,
    ):
        try:
            found.append(read())
        except (RuntimeError, AttributeError):  # flags of both kinds that disagree; an older torch
            found.append("unreadable")
    return found


@pytest.mark.parametrize(
    "setting", [name for name in SETTINGS if NEW_FLAGS or "fp32_precision" not in name]
)
def test_products_of_the_loss_are_ieee_fp32(setting, fp32_flags, monkeypatch):
    SETTINGS[setting]()
    before = flags()
    assert product_precision("cuda") == torch.float16
    assert (
        replay_tolerance(nn.Linear(1, 1), torch.device("cuda"), torch.no_grad)
        == REPLAY_TOLERANCE[torch.float16]
    )
    for device in ("cuda", "cpu"):
        with ieee_products(device):
            assert product_precision(device) == torch.float32
            assert (
                device == "cpu" or not torch.backends.cuda.matmul.allow_tf32
            )  # readable: cuBLAS asks it
        assert flags() == before
    chunk, seen = Logits.chunk, []
    now = lambda: seen.append(product_precision("cpu"))  # noqa: E731
    monkeypatch.setattr(Logits, "chunk", lambda *given, **named: now() or chunk(*given, **named))
    ContrastiveLoss()(*torch.randn(2, 4, 8).requires_grad_(), torch.tensor(3.0)).backward()
    loss = lambda **values: now() or ClipLoss()(**values)  # noqa: E731
    accumulated(bert_clip(torch.float32), loss, batches([2, 2], torch.float32))
    assert len(seen) == 2 and set(seen) == {torch.float32} and flags() == before


# ------------------------------------------------------------------------------------------------ other people's models


VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
VISION |= {"image_size": 32, "patch_size": 16}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXT |= {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}


def clip_model():
    config = CLIPConfig(
        text_config={
            **TEXT,
            "attention_dropout": 0.1,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={**VISION, "attention_dropout": 0.1},
        projection_dim=8,
    )
    return CLIPModel(config)


def dual_encoder():
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        ViTConfig(**VISION, hidden_dropout_prob=0.1),
        BertConfig(**TEXT, hidden_dropout_prob=0.1),
        projection_dim=8,
    )
    return VisionTextDualEncoderModel(config)


def siglip():
    text = {**TEXT, "projection_size": 16, "attention_dropout": 0.1}
    return SiglipModel(
        SiglipConfig(text_config=text, vision_config={**VISION, "attention_dropout": 0.1})
    )


def tokenized(size, generator):
    ids = torch.randint(3, VOCABULARY, (size, CONTEXT), generator=generator)
    lengths = torch.randint(3, CONTEXT + 1, (size, 1), generator=generator)
    mask = (torch.arange(CONTEXT) < lengths).long()
    return BatchEncoding({"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask})


CLIP_IN_FP64 = pytest.mark.skipif(
    version("transformers").startswith("4."),
    reason="transformers 4 writes the least fp64 number of CLIP's mask in fp32",
)


@pytest.mark.parametrize(
    "make", [pytest.param(clip_model, marks=CLIP_IN_FP64), dual_encoder, siglip]
)
def test_hugging_face_models_in_the_documented_adapter(make):
    scope = {}
    exec(compile(documented("class HuggingFaceTowers"), "docs/dga.md", "exec"), scope)
    model = seeded(lambda: scope["HuggingFaceTowers"](make()))
    generator = torch.Generator().manual_seed(1)
    micro_batches = [
        (
            {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator).double()},
            tokenized(size, generator),
        )
        for size in (3, 2, 4)
    ]
    theirs, ours = (
        (SigLipLoss(), SigmoidLoss()) if make is siglip else (ClipLoss(), ContrastiveLoss())
    )
    _, wanted = reference(model, theirs, micro_batches)
    for retain in (0, 1):
        _, found = accumulated(model, ours, micro_batches, retain=retain)
        assert error(found, wanted) <= EXACT
