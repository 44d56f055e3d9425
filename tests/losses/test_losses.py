"""ContrastiveLoss in one process by hand, against autograd and open_clip's ClipLoss (over ranks: dga/test_random_steps.py)."""

import math
from functools import partial

import pytest
import torch
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
    """Two (n, d) matrices of unit rows that want gradients; `alike` near 1 makes texts near-copies of images."""
    generator = torch.Generator().manual_seed(seed)
    images = normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    noise = normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    texts = normalize(alike * images + (1 - alike) * noise, dim=-1)
    return images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_()


def value_and_gradients(loss, images, texts, *scalars, **inputs):
    """The loss and its gradients by images, texts, the scale (20 if none is given) and the bias (if one is given)."""
    dtype = torch.promote_types(images.dtype, torch.float32)
    scalars = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in scalars or (20.0,)]
    value = loss(images, texts, *scalars, **inputs)
    return value.detach(), *torch.autograd.grad(value, [images, texts, *scalars])


def relative(found, reference):
    return ((found.double() - reference.double()).norm() / reference.double().norm()).item()


def test_two_orthogonal_pairs_by_hand():
    """A.2 with s = 1 and unit vectors: every softmax is (p, 1 - p) with p = e / (e + 1)."""
    sides, p = (
        (torch.eye(2, dtype=torch.float64).requires_grad_() for _ in range(2)),
        math.e / (math.e + 1),
    )
    value, of_images, _, of_scale = value_and_gradients(ContrastiveLoss(), *sides, 1.0)
    assert (value.item(), of_scale.item()) == pytest.approx((-math.log(p), p - 1), rel=1e-14)
    assert of_images[0].tolist() == pytest.approx([(p - 1) / 2, (1 - p) / 2], rel=1e-14)


@pytest.mark.parametrize("chunk_size", [None, 2, 5])
def test_mixup_is_the_papers_two_terms(chunk_size):
    """A.3 as written, term by term, with autograd; partners reversed within micro-batches of 3 and 4."""
    images, texts = features(7)
    lam, partner = 0.85, reversed_partner([3, 4])
    assert partner.tolist() == [2, 1, 0, 6, 5, 4, 3]

    def paper(i, t, s):
        total = 0.0
        for query, key in ((i, t), (t, i)):
            for j in range(7):
                normaliser = torch.logsumexp(s * query[j] @ key.T, dim=0)
                total = total - lam * (s * query[j] @ key[j] - normaliser) / 7
                total = total - (1 - lam) * (s * query[j] @ key[int(partner[j])] - normaliser) / 7
        return (
            total / 2
        )  # open_clip's convention (and the paper's code): the mean of both directions

    ours = value_and_gradients(
        ContrastiveLoss(chunk_size=chunk_size), images, texts, mixup_lambda=lam, partner=partner
    )
    assert max(map(relative, ours, value_and_gradients(paper, images, texts))) <= 1e-12


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 13, 50])
@pytest.mark.parametrize(
    ("ours", "theirs", "scalars"),
    [(ContrastiveLoss, ClipLoss, (20.0,)), (SigmoidLoss, SigLipLoss, (5.0, -2.0))],
)
def test_equals_open_clips_loss(ours, theirs, scalars, chunk_size):
    sides = features(13)
    found = value_and_gradients(ours(chunk_size=chunk_size), *sides, *scalars)
    assert max(map(relative, found, value_and_gradients(theirs(), *sides, *scalars))) <= 1e-12


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
    assert (
        relative(image_grad, reference[1]) <= 2**-8 and relative(text_grad, reference[2]) <= 2**-8
    )


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
    assert relative(gradient.double() / 2**16, reference) <= 2**-10


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
    images, texts = features(4)
    scale, bias = (
        torch.full((1,), 20.0, dtype=torch.float64, requires_grad=True),
        torch.zeros((), requires_grad=True),
    )
    inputs = {
        "image_features": images,
        "text_features": texts,
        "logit_scale": scale,
        "logit_bias": bias,
    }
    losses = ContrastiveLoss()(**inputs, output_dict=True)
    assert list(losses) == ["contrastive_loss"] and losses["contrastive_loss"].ndim == 0
    losses["contrastive_loss"].backward()
    assert scale.grad.shape == (1,) and scale.grad.abs() > 0
    assert bias.grad.item() == 0.0  # a constant on all logits changes no softmax
    with torch.no_grad():
        assert not ContrastiveLoss()(images, texts, scale).requires_grad
    images, texts = features(4)
    ContrastiveLoss()(images, texts.detach(), torch.tensor(20.0)).backward()
    assert images.grad is not None and texts.grad is None  # only the wanted gradients


FOUR, IDS4, SCALE = features(4), sample_ids(4, 0), torch.tensor(20.0)
MIXED = {"mixup_lambda": 0.5, "partner": reversed_partner([4])}
# (options of the loss, arguments of its call in place of the four pairs, the sentence)
REFUSED = [
    ({"rank": 2, "world_size": 2}, {}, "rank is 2"),
    ({"world_size": 2}, {}, "not initialised"),
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


# The softmax and the sigmoid: (loss, its dense definition, scale and bias).
KINDS = {
    "softmax": (ContrastiveLoss, DenseLoss, (5.0,)),
    "sigmoid": (SigmoidLoss, partial(DenseLoss, sigmoid=True), (5.0, -2.0)),
}


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positives", ["caption", "image", "both"])
def test_options_are_their_dense_definition(positives, kind, chunk_size):
    """Against autograd on whole matrices; without the option the gradient is another."""
    make, dense, scalars = KINDS[kind]
    sides, inputs = features(13), {"ids": sample_ids(13, 0)}
    wanted = value_and_gradients(dense(positives=positives), *sides, *scalars, **inputs)
    loss = make(chunk_size=chunk_size, positives=positives)
    found = value_and_gradients(loss, *sides, *scalars, **inputs)
    assert max(map(relative, found, wanted)) <= 1e-12
    assert loss.report.pair_losses.mean().item() == pytest.approx(wanted[0].item(), rel=1e-12)
    plain = value_and_gradients(make(), *sides, *scalars)
    assert relative(plain[1], wanted[1]) >= (0.05 if kind == "softmax" else 0.02)


@pytest.mark.parametrize(
    ("kind", "positives"), [("softmax", "caption"), ("softmax", "pair"), ("sigmoid", "pair")]
)
def test_single_precision_at_scale_100(kind, positives):
    """Most logits of the sigmoid are far on the right side, where 1 - sigmoid would be rounded to zero."""
    (make, dense, _), options, n = KINDS[kind], {"positives": positives}, 300
    single = [x.detach().float().requires_grad_() for x in features(n, d=32, alike=0.35)]
    inputs = {"ids": sample_ids(n, 0)}
    wanted = value_and_gradients(
        dense(**options), *(x.detach().double().requires_grad_() for x in single), 100.0, **inputs
    )
    found = value_and_gradients(make(chunk_size=64, **options), *single, 100.0, **inputs)
    assert max(map(relative, found, wanted)) <= 2e-5


def test_two_ids_are_joined_without_two_pairs_getting_one():
    """Captions 0, 1 and pictures 1, 0: joined with a factor of N - 1 both would be 1, and nobody a positive."""
    sides = features(2)
    ids = {"caption": torch.tensor([0, 1]), "image": torch.tensor([1, 0])}
    found = value_and_gradients(ContrastiveLoss(positives="both"), *sides, ids=ids)
    assert max(map(relative, found, value_and_gradients(ContrastiveLoss(), *sides))) <= 1e-12


@pytest.mark.filterwarnings("error")
def test_ids_may_be_columns_of_a_table():
    """As the training gives them: torch printed a warning of its own about their memory."""
    torch.set_warn_always(True)
    try:
        caption, image = torch.tensor([[0, 1], [0, 2], [3, 2]]).unbind(dim=1)
        ids = {"caption": caption, "image": image}
        value_and_gradients(ContrastiveLoss(positives="both"), *features(3), ids=ids)
    finally:
        torch.set_warn_always(False)


def test_report_of_sources():
    images, texts = features(5)
    loss = ContrastiveLoss()
    loss(images, texts, torch.tensor(5.0), ids={"source": torch.tensor([0, 1, 0, 1, 1])})
    assert loss.report.sources.tolist() == [0, 1, 0, 1, 1]
    loss(images, texts, torch.tensor(5.0))
    assert loss.report.sources is None


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
