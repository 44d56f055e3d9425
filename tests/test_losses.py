"""ContrastiveLoss in one process against hand computation, autograd and open_clip's ClipLoss (ranks: test_dga_ranks.py)."""

import math

import pytest
import torch
from open_clip.loss import ClipLoss
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss, reversed_partner


def features(n, d=8, dtype=torch.float64, seed=0, alike=0.0):
    """Two (n, d) matrices of unit rows that want gradients; `alike` near 1 makes texts near-copies of images."""
    generator = torch.Generator().manual_seed(seed)
    images = normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    noise = normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    texts = normalize(alike * images + (1 - alike) * noise, dim=-1)
    return images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_()


def value_and_gradients(loss, images, texts, scale=20.0, **inputs):
    scale = torch.tensor(scale, dtype=torch.promote_types(images.dtype, torch.float32), requires_grad=True)
    value = loss(images, texts, scale, **inputs)
    return value.detach(), *torch.autograd.grad(value, [images, texts, scale])


def relative(found, reference):
    return ((found.double() - reference.double()).norm() / reference.double().norm()).item()


def test_gradient_by_hand_two_orthogonal_pairs():
    # A.2 with s = 1, images = texts = unit vectors: every softmax is (p, 1-p) with p = e/(e+1).
    # (P + Q - 2Y) = 2 [[p-1, 1-p], [1-p, p-1]]; times T and 1/(2N) = 1/4: rows (p-1)/2 * (1, -1); d/ds = p - 1.
    p = math.e / (math.e + 1)
    images, texts = (
        torch.eye(2, dtype=torch.float64).requires_grad_(),
        torch.eye(2, dtype=torch.float64).requires_grad_(),
    )
    value, image_grad, text_grad, scale_grad = value_and_gradients(ContrastiveLoss(), images, texts, 1.0)
    expected = (p - 1) / 2 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert value.item() == pytest.approx(-math.log(p), rel=1e-14)
    torch.testing.assert_close(image_grad, expected, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(text_grad, expected, rtol=1e-14, atol=1e-15)
    assert scale_grad.item() == pytest.approx(p - 1, rel=1e-14)


def test_mixup_by_hand_two_orthogonal_pairs():
    # A.3 with lambda = 0.7: each row's target is (0.7, 0.3) over (itself, its partner).
    p, lam = math.e / (math.e + 1), 0.7
    images, texts = (
        torch.eye(2, dtype=torch.float64).requires_grad_(),
        torch.eye(2, dtype=torch.float64).requires_grad_(),
    )
    value, image_grad, text_grad, scale_grad = value_and_gradients(
        ContrastiveLoss(), images, texts, 1.0, mixup_lambda=lam, partner=reversed_partner([2])
    )
    expected = (p - lam) / 2 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert value.item() == pytest.approx(-(lam * math.log(p) + (1 - lam) * math.log(1 - p)), rel=1e-14)
    torch.testing.assert_close(image_grad, expected, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(text_grad, expected, rtol=1e-14, atol=1e-15)
    assert scale_grad.item() == pytest.approx(p - lam, rel=1e-14)


@pytest.mark.parametrize("chunk_size", [None, 2, 5])
def test_mixup_is_the_papers_two_terms(chunk_size):
    """A.3 as written, term by term, with autograd; partners reversed within micro-batches of 3 and 4."""
    images, texts = features(7)
    lam, partner = 0.85, reversed_partner([3, 4])

    def paper(i, t, s):
        total = 0.0
        for query, key in ((i, t), (t, i)):
            for j in range(7):
                normaliser = torch.logsumexp(s * query[j] @ key.T, dim=0)
                total = total - lam * (s * query[j] @ key[j] - normaliser) / 7
                total = total - (1 - lam) * (s * query[j] @ key[int(partner[j])] - normaliser) / 7
        return total / 2  # open_clip's convention (and the paper's code): the mean of both directions

    ours = value_and_gradients(ContrastiveLoss(chunk_size=chunk_size), images, texts, mixup_lambda=lam, partner=partner)
    for found, reference in zip(ours, value_and_gradients(paper, images, texts), strict=True):
        assert relative(found, reference) <= 1e-12


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 13, 50])
def test_equals_open_clips_loss(chunk_size):
    images, texts = features(13)
    ours = value_and_gradients(ContrastiveLoss(chunk_size=chunk_size), images, texts)
    for found, reference in zip(ours, value_and_gradients(ClipLoss(), images, texts), strict=True):
        assert relative(found, reference) <= 1e-12


def test_mixup_weight_of_one_is_no_mixup():
    images, texts = features(6)
    mixed = value_and_gradients(ContrastiveLoss(), images, texts, mixup_lambda=1.0, partner=reversed_partner([6]))
    for found, reference in zip(mixed, value_and_gradients(ContrastiveLoss(), images, texts), strict=True):
        assert torch.equal(found, reference)


def test_numerical_derivative():
    images, texts = features(5, d=3)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    loss = ContrastiveLoss(chunk_size=2)
    assert torch.autograd.gradcheck(
        lambda i, t, s: loss(i, t, s, mixup_lambda=0.6, partner=reversed_partner([2, 3])), (images, texts, scale)
    )


@pytest.mark.parametrize("alike", [0.0, 0.35])
def test_fp32_against_fp64_at_medium_size(alike):
    """N=700, scale 100, ragged last chunk. `alike` 0.35: most pairs are won, P - Y is small and must not cancel away."""
    images, texts = features(700, d=64, alike=alike)
    reference = value_and_gradients(ContrastiveLoss(), images, texts, 100.0)
    single = [x.detach().float().requires_grad_() for x in (images, texts)]
    whole = value_and_gradients(ContrastiveLoss(), *single, 100.0)
    for chunk_size in (64, 699):
        chunked = value_and_gradients(ContrastiveLoss(chunk_size=chunk_size), *single, 100.0)
        stock = value_and_gradients(ClipLoss(), *single, 100.0)
        for found, unchunked, theirs, exact in zip(chunked, whole, stock, reference, strict=True):
            # Inputs rounded to fp32 at scale 100 move the gradient by about 100 * 2^-24: 5e-5 is the invariant's bound.
            assert relative(found, exact) <= 5e-5
            assert relative(found, unchunked) <= 2e-5
            assert relative(found, exact) <= 3 * relative(theirs, exact) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safe_at_scale_100_with_near_duplicates(dtype):
    images, _ = features(64, dtype=dtype)
    images = torch.cat([images, images + 1e-6]).detach().requires_grad_()
    texts = (-images).detach().requires_grad_()  # the worst: positives at -100, nothing to win
    for found in value_and_gradients(ContrastiveLoss(chunk_size=10), images, texts, 100.0):
        assert torch.isfinite(found).all()


def test_half_precision_features_are_computed_in_fp32():
    """Against fp64 on the same rounded features only the final rounding of the gradient is left, under autocast too."""
    images, texts = features(96, d=32, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (images, texts)]
    reference = value_and_gradients(ContrastiveLoss(), *exact, 100.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, image_grad, text_grad, scale_grad = value_and_gradients(
            ContrastiveLoss(chunk_size=40), images, texts, 100.0
        )
    assert value.dtype == torch.float32 and image_grad.dtype == torch.bfloat16
    assert relative(value, reference[0]) <= 1e-6 and relative(scale_grad, reference[3]) <= 1e-5
    assert relative(image_grad, reference[1]) <= 2**-8 and relative(text_grad, reference[2]) <= 2**-8


def test_half_precision_gradients_survive_a_loss_scaler():
    """Gradients below fp16's smallest number (6e-8) come out once scaled: they are kept in fp32 until then."""
    images, texts = features(64, d=32, dtype=torch.float16, alike=0.55)
    scaled = ContrastiveLoss()(images, texts, torch.tensor(30.0)) * 2.0**16
    (gradient,) = torch.autograd.grad(scaled, images)
    exact = [x.detach().double().requires_grad_() for x in (images, texts)]
    reference = value_and_gradients(ContrastiveLoss(), *exact, 30.0)[1]
    assert (reference.abs() < 2**-24).float().mean() > 0.02  # the case is one: many would have been lost
    assert relative(gradient.double() / 2**16, reference) <= 2**-10


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
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
    images, texts = features(4)
    scale, bias = torch.full((1,), 20.0, dtype=torch.float64, requires_grad=True), torch.zeros((), requires_grad=True)
    inputs = {"image_features": images, "text_features": texts, "logit_scale": scale, "logit_bias": bias}
    losses = ContrastiveLoss()(**inputs, output_dict=True)
    assert list(losses) == ["contrastive_loss"] and losses["contrastive_loss"].ndim == 0
    losses["contrastive_loss"].backward()
    assert scale.grad.shape == (1,) and scale.grad.abs() > 0
    assert bias.grad.item() == 0.0  # a constant on all logits changes no softmax
    with torch.no_grad():
        assert not ContrastiveLoss()(images, texts, scale).requires_grad


def test_only_wanted_gradients():
    images, texts = features(4)
    ContrastiveLoss()(images, texts.detach(), torch.tensor(20.0)).backward()
    assert images.grad is not None and texts.grad is None


def test_reversed_partner():
    assert reversed_partner([3, 2, 1]).tolist() == [2, 1, 0, 4, 3, 5]
    assert reversed_partner([]).tolist() == []


def test_refusals():
    images, texts = features(4)
    scale, partner = torch.tensor(20.0), reversed_partner([4])
    with pytest.raises(UserError, match=r"chunk_size .* 0"):
        ContrastiveLoss(chunk_size=0)
    with pytest.raises(UserError, match="rank is 2"):
        ContrastiveLoss(rank=2, world_size=2)
    with pytest.raises(UserError, match="not initialised"):
        ContrastiveLoss(world_size=2)(images, texts, scale)
    with pytest.raises(UserError, match=r"\(4, 8\) and \(3, 8\)"):
        ContrastiveLoss()(images, texts[:3], scale)
    with pytest.raises(UserError, match=r"logit_scale .* \(2,\)"):
        ContrastiveLoss()(images, texts, torch.ones(2))
    with pytest.raises(UserError, match="only partner"):
        ContrastiveLoss()(images, texts, scale, partner=partner)
    with pytest.raises(UserError, match=r"between 0 and 1, but is 1.5"):
        ContrastiveLoss()(images, texts, scale, mixup_lambda=1.5, partner=partner)
    with pytest.raises(UserError, match=r"\(4,\) int64"):
        ContrastiveLoss()(images, texts, scale, mixup_lambda=0.5, partner=partner[:3])
    for wrong in ([1, 2, 3, 0], [4, 2, 1, 0], [-1, 2, 1, 0]):
        with pytest.raises(UserError, match="its own inverse"):
            ContrastiveLoss()(images, texts, scale, mixup_lambda=0.5, partner=torch.tensor(wrong))
