"""Decoupled gradient accumulation on models and losses that are not open_clip's, against one graph (fp64, 1e-10)."""

import copy
import functools
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize
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

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import ieee_products, product_precision
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
    gradients,
    reference,
)
from support.two_towers import (
    FIXED_SCALE,
    FORMS,
    ImageImage,
    TextText,
    image_batches,
    seeded,
    token_batches,
)

EXACT = TOLERANCE[torch.float64]
# --------------------------------------------------------------------------------------------------------------- losses


class Kernels(torch.autograd.Function):
    """A symmetric contrastive loss whose forward pass computes its gradients, as fused kernels do."""

    @staticmethod
    def forward(ctx, images, texts, temperature):
        with torch.enable_grad():
            leaves = [side.detach().requires_grad_() for side in (images, texts)]
            value = ClipLoss()(*leaves, torch.tensor(1 / temperature))
            ctx.save_for_backward(*torch.autograd.grad(value, leaves))
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, factor):
        images, texts = ctx.saved_tensors
        return factor * images, factor * texts, None


def test_the_documented_adapter_of_a_loss_with_its_own_gradients(monkeypatch):
    """On the CPU by a stand-in with memeff's signature; tests/gpu has the real one."""

    def stand_in(*, temperature, stable):
        assert not stable
        return lambda *sides: Kernels.apply(*(normalize(side) for side in sides), temperature)

    monkeypatch.setitem(sys.modules, "memeff", SimpleNamespace(MemoryEfficientCLIPLoss=stand_in))
    scope = {"world_size": 1}
    exec(documented("memeff"), scope)
    model, micro_batches = seeded(TextText), token_batches([3, 2, 2])
    exact = functools.partial(ClipLoss(), logit_scale=torch.tensor(50.0))
    _, wanted = reference(model, exact, micro_batches)
    for retain in (0, 1):
        _, found = accumulated(model, scope["memory_efficient"], micro_batches, retain=retain)
        assert error(found, wanted) <= EXACT


# -------------------------------------------------------------------------------------------------- inputs and outputs


def test_a_batch_stays_where_the_caller_keeps_it():
    """A BatchEncoding's own `to` moves in place."""
    seen = []

    class Watching(TextText):
        def forward(self, left, right):
            seen.append(left)
            return super().forward(left, right)

    tokens, wrap = FORMS["BatchEncoding"]
    model, micro_batches = seeded(lambda: Watching(tokens)), token_batches([2, 2], wrap)
    accumulated(model, functools.partial(ClipLoss(), **FIXED_SCALE), micro_batches)
    assert all(type(side) is BatchEncoding for side in seen)
    assert not {id(side) for side in seen} & {id(side) for pair in micro_batches for side in pair}


# ---------------------------------------------------------------------------------------------- modes of the caller


def test_under_no_grad_it_works_and_under_inference_mode_it_is_refused():
    model, micro_batches = bert_clip(), batches([3, 2])
    _, wanted = reference(model, ClipLoss(), micro_batches)
    for retain in (0, 1, 2):
        with torch.no_grad():
            _, found = accumulated(model, ContrastiveLoss(), micro_batches, retain=retain)
        assert error(found, wanted) <= EXACT
    with torch.inference_mode(), pytest.raises(UserError, match="under torch.inference_mode"):
        accumulated(model, ContrastiveLoss(), micro_batches)


def test_in_an_autocast_region_of_the_caller(monkeypatch):
    """Its cache may hold casts of weights that the first pass made without graph (on some versions of torch): cleared."""
    model, micro_batches = bert_clip(torch.float32), batches([3, 2, 2], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, wanted = reference(model, ClipLoss(), micro_batches)
    clear, calls = torch.clear_autocast_cache, []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append(None) or clear())
    for retain in (0, 1):
        calls.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, found = accumulated(model, ContrastiveLoss(), micro_batches, retain=retain)
        # before each forward pass with graph and each backward pass, and by torch as the region ends
        assert len(calls) == 3 + 3 + 1
        assert (
            error(found, wanted) <= 0.3
        )  # bf16's roundings; without the weights' gradients it is 1


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


def test_ddp_of_one_rank_keeps_all_graphs(one_rank):
    model, micro_batches = bert_clip(), batches([3, 2, 2])
    _, wanted = reference(model, ClipLoss(), micro_batches)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    step = DecoupledGradientAccumulation(wrapped, ContrastiveLoss(), retain=3)
    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(SEED)
        step.backward(micro_batches)
        assert error(gradients(model), wanted) <= EXACT


def test_retain_auto_waits_for_an_optimizer_step():
    """A GradScaler leaves the first steps out: AdamW has no state yet, and the free memory is too large by it."""
    model, micro_batches = bert_clip(torch.float32), batches([3, 2, 2], torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(), scaler=scaler, retain="auto")
    decided = []
    for number in range(4):
        optimizer.zero_grad()
        step.backward(
            micro_batches, prepare=lambda images, texts, n=number: (images / (n > 1), texts)
        )  # inf at first
        decided.append((step._retention._auto is not None, bool(optimizer.state)))
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6)  # as training does in every step
    assert decided == [(False, False)] * 3 + [(True, True)]


def test_retain_auto_decides_where_an_optimizer_leaves_parameters_out():
    model, micro_batches = bert_clip(), batches([3, 2])
    optimizer = torch.optim.SGD(model.visual.parameters(), lr=0.1)
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(), retain="auto")
    step.backward(micro_batches)
    optimizer.step()
    model.zero_grad()
    assert step.decision() is not None


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
def test_products_of_the_loss_are_ieee_fp32(setting, fp32_flags):
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
    seen = []

    def loss(**values):
        seen.append(product_precision("cpu"))
        return ClipLoss()(**values)

    accumulated(bert_clip(torch.float32), loss, batches([2, 2], torch.float32))
    assert seen == [torch.float32] and flags() == before


def test_our_loss_by_itself_sets_the_flags(fp32_flags, monkeypatch):
    SETTINGS["medium"]()
    assert product_precision("cpu") == torch.bfloat16
    seen = []
    chunk = Logits.chunk
    monkeypatch.setattr(
        Logits,
        "chunk",
        lambda *given, **named: seen.append(product_precision("cpu")) or chunk(*given, **named),
    )
    features = torch.randn(2, 4, 8)
    ContrastiveLoss(chunk_size=2)(*features.requires_grad_(), torch.tensor(3.0)).backward()
    assert set(seen) == {torch.float32} and product_precision("cpu") == torch.bfloat16


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
@pytest.mark.parametrize("frozen", [None, "vision_model", "text_model"])
def test_hugging_face_models_in_the_documented_adapter(make, frozen):
    scope = {}
    exec(compile(documented("class HuggingFaceTowers"), "docs/dga.md", "exec"), scope)
    model = seeded(lambda: scope["HuggingFaceTowers"](make()))
    if frozen:
        getattr(model.model, frozen).requires_grad_(False)
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
    with pytest.raises(UserError, match="adapter .docs/dga.md"):
        accumulated(
            seeded(make),
            ContrastiveLoss(),
            [(texts["input_ids"], images["pixel_values"]) for images, texts in micro_batches],
        )
