"""Both losses in one process against autograd on whole matrices (over ranks: dga/test_random_steps.py), and what they hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss, SigLipLoss
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss, reversed_partner
from scripts.bench.harness import PeakBytes
from support import ROOT
from support.dense_loss import DenseLoss, sample_ids


def features(n, d=8, dtype=torch.float64, seed=0, alike=0.0):
    """Two (n, d) matrices of unit rows that want gradients; with `alike` near 1 texts are near-copies of images."""
    generator = torch.Generator().manual_seed(seed)
    images, noise = normalize(torch.randn(2, n, d, generator=generator).double(), dim=-1)
    texts = normalize(alike * images + (1 - abs(alike)) * noise, dim=-1)
    return images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_()


def value_and_gradients(loss, images, texts, *scalars, **inputs):
    """The loss and its gradients by images, texts, the scale (20 if none is given) and the bias (if one is given)."""
    dtype = torch.promote_types(images.dtype, torch.float32)
    scalars = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in scalars or (20.0,)]
    value = loss(images, texts, *scalars, **inputs)
    return value.detach(), *torch.autograd.grad(value, [images, texts, *scalars])


# the softmax and the sigmoid: (loss, open_clip's, scalars beside the scale)
KINDS = {"softmax": (ContrastiveLoss, ClipLoss, ()), "sigmoid": (SigmoidLoss, SigLipLoss, (-2.0,))}
# of value and scalars, and of the features' gradients, which are rounded to the features' precision
BOUNDS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-5, 2**-8),
    torch.float16: (2e-5, 2**-10),
}


@st.composite
def cases(draw):
    kind, sizes = (
        draw(st.sampled_from([*KINDS])),
        draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    )
    mixed = kind == "softmax" and draw(st.booleans())
    ids = st.lists(st.integers(0, sum(sizes)), min_size=sum(sizes), max_size=sum(sizes))
    return {
        "kind": kind,
        "sizes": sizes,
        "chunk_size": draw(st.none() | st.integers(1, sum(sizes) + 1)),
        "positives": "pair"
        if mixed
        else draw(st.sampled_from(["pair", "caption", "image", "both"])),
        "mixup_lambda": draw(st.floats(0, 1)) if mixed else None,
        "ids": {name: torch.tensor(draw(ids)) for name in ("source", "caption", "image")},
        "scale": draw(st.sampled_from([1.0, 20.0, 100.0])),
        # near-copies, or positives at -100, where nothing is to be won
        "alike": draw(st.sampled_from([0.0, 0.55, 0.99, -1.0])),
        "dtype": draw(st.sampled_from([*BOUNDS])),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(cases())
def test_every_loss_is_its_dense_definition(case):
    """By value and gradients in fp64 at least, whatever the caller's autocast; the plain ones are open_clip's."""
    (make, theirs, more), n, scale = KINDS[case["kind"]], sum(case["sizes"]), case["scale"]
    sides = features(n, dtype=case["dtype"], seed=case["seed"], alike=case["alike"])
    inputs, exact = {"ids": case["ids"]}, [x.detach().double().requires_grad_() for x in sides]
    if case["mixup_lambda"] is not None:
        inputs["partner"] = reversed_partner(case["sizes"])
        inputs["mixup_lambda"] = case["mixup_lambda"]
    dense = DenseLoss(positives=case["positives"], sigmoid=case["kind"] == "sigmoid")
    wanted = value_and_gradients(dense, *exact, scale, *more, **inputs)
    loss = make(chunk_size=case["chunk_size"], positives=case["positives"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = value_and_gradients(loss, *sides, scale, *more, **inputs)
    of_scalars, of_features = BOUNDS[case["dtype"]]
    for number, (ours, reference) in enumerate(zip(found, wanted, strict=True)):
        is_features = number in (1, 2)
        own = reference.norm() + (0.1 * scale / n if is_features else 0.1)
        assert (ours.double() - reference).norm() <= (
            of_features if is_features else of_scalars
        ) * own
    assert found[0].dtype == torch.promote_types(case["dtype"], torch.float32)
    assert loss.report.pair_losses.mean().item() == pytest.approx(found[0].item(), rel=1e-5)
    assert torch.equal(loss.report.sources, case["ids"]["source"])
    if case["positives"] == "pair" and len(inputs) == 1:
        plain = value_and_gradients(theirs(), *exact, scale, *more)
        torch.testing.assert_close(plain, wanted, rtol=1e-9, atol=1e-12)


def test_half_precision_gradients_survive_a_loss_scaler():
    """Gradients below fp16's smallest number (6e-8) come out once scaled: they are kept in fp32 until then."""
    images, texts = features(64, d=32, dtype=torch.float16, alike=0.55)
    scaled = ContrastiveLoss()(images, texts, torch.tensor(30.0)) * 2.0**16
    (gradient,) = torch.autograd.grad(scaled, images)
    exact = [x.detach().double().requires_grad_() for x in (images, texts)]
    reference = value_and_gradients(ContrastiveLoss(), *exact, 30.0)[1]
    assert (
        reference.abs() < 2**-24
    ).float().mean() > 0.02  # the case is one: many would have been lost
    assert (gradient.double() / 2**16 - reference).norm() <= 2**-10 * reference.norm()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))]
        )
        return result


def test_only_a_chunk_of_logits_is_alive():
    n, chunk_size = 300, 16
    images, texts = features(n, d=4)
    with LargestTensor() as seen:
        value_and_gradients(ContrastiveLoss(chunk_size=chunk_size), images, texts)
    assert seen.numel == chunk_size * n
    with LargestTensor() as seen:
        value_and_gradients(ContrastiveLoss(), images, texts)
    assert seen.numel == n * n


def test_called_as_open_clips_training_loop_calls_it():
    (images, texts), bias = features(4), torch.zeros((), requires_grad=True)
    scale = torch.full((1,), 20.0, dtype=torch.float64, requires_grad=True)
    features_of = {"image_features": images, "text_features": texts.detach()}
    losses = ContrastiveLoss()(**features_of, logit_scale=scale, logit_bias=bias, output_dict=True)
    assert list(losses) == ["contrastive_loss"] and losses["contrastive_loss"].ndim == 0
    losses["contrastive_loss"].backward()
    assert images.grad is not None and texts.grad is None  # only the wanted gradients
    assert scale.grad.shape == (1,) and scale.grad.abs() > 0
    assert bias.grad.item() == 0.0  # a constant on all logits changes no softmax


FOUR, IDS4, SCALE = features(4), sample_ids(4, 0), torch.tensor(20.0)
MIXED = {"mixup_lambda": 0.5, "partner": reversed_partner([4])}
# (options of the loss, arguments of its call in place of the four pairs, the sentence)
REFUSED = [
    ({"rank": 2, "world_size": 2}, {}, "rank is 2"),
    ({"gather_grad": False, "positives": "caption"}, {}, "plain loss"),
    ({}, {"text_features": FOUR[1][:3]}, r"\(4, 8\) and \(3, 8\)"),
    ({}, {"partner": MIXED["partner"]}, "only partner"),
    ({}, {**MIXED, "partner": torch.tensor([1, 2, 3, 0])}, "its own inverse"),
    ({}, {**MIXED, "partner": torch.tensor([-1, 2, 1, 0])}, "its own inverse"),
    ({}, {**MIXED, "mixup_lambda": 1.5}, "mixup_lambda lies in 0..1"),
    ({"positives": "caption"}, {"ids": {"caption": torch.arange(1)}}, r"caption has \(1,\) rows"),
    ({"positives": "image"}, {"ids": {"image": torch.arange(5)}}, r"image has \(5,\) rows"),
    ({}, MIXED, "mixup is not defined with the sigmoid loss"),
    ({"positives": "caption"}, {"ids": IDS4, **MIXED}, "mixup is not defined with positives='caption'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "inputs", "message"), REFUSED)
def test_refusals(options, inputs, message):
    images, texts = FOUR
    loss = SigmoidLoss if "sigmoid" in message else ContrastiveLoss
    with pytest.raises(UserError, match=message):
        loss(**options)(
            **{"image_features": images, "text_features": texts, "logit_scale": SCALE, **inputs}
        )


@pytest.mark.slow  # the chunks' bookkeeping at 65,536 rows takes minutes; nothing is computed
def test_memory_at_65536_pairs_is_that_of_the_documentation():
    """D = 512, chunks of 256 rows, by shapes alone."""
    with FakeTensorMode():
        features = [torch.empty(65536, 512, requires_grad=True) for _ in range(2)]
        with PeakBytes() as seen:
            value = ContrastiveLoss(chunk_size=256)(*features, torch.tensor(100.0))
            torch.autograd.grad(value, features)
    made, whole = (held / 2**30 for held in (seen.peak, seen.peak + 2 * features[0].nbytes))
    assert whole < 0.8
    said = " ".join((ROOT / "docs" / "methods.md").read_text("utf-8").split())
    assert f"{made:.2f} GiB ({whole:.2f} with its inputs)" in said
