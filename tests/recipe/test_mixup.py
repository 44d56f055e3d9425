"""Coin-flip mixup equals A.3's formulas, also under decoupled accumulation, and repeats after a resume.

Over two ranks, through the whole program: tests/training/test_whole_program.py.
"""

import math
from functools import partial

import numpy as np
import open_clip
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix, mix_rows
from support.dga_reference import (
    TOLERANCE,
    accumulated,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
    reference,
)
from support.two_towers import stock_clip

EXACT = TOLERANCE[torch.float64]


def attached(model, **options):
    mixup = CoinFlipMixup(**options)
    mixup.attach(model)
    return mixup


def paper_loss(image_features, text_features, temperature, weight):
    """A.3, term by term, as the paper writes it: both directions, a sum over rows j, two positives each."""
    n, total = len(image_features), 0.0
    for own, other in ((image_features, text_features), (text_features, image_features)):
        for j in range(n):
            denominator = sum(torch.exp(own[j] @ other[k] / temperature) for k in range(n))
            pair = torch.log(torch.exp(own[j] @ other[j] / temperature) / denominator)
            partner = torch.log(torch.exp(own[j] @ other[n - 1 - j] / temperature) / denominator)
            total = total - (weight * pair + (1 - weight) * partner) / n
    return total


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixes_images", [True, False])
def test_values_and_gradients_are_those_of_the_paper(mixes_images):
    model = bert_clip().eval()
    mixup = attached(model)
    (images, texts), mix = batches([5])[0], Mix(mixes_images, 0.7)

    with mixup.applied(mix):
        output = model(*mix.prepare(images, texts))
    loss = ContrastiveLoss()(**output, **mix.loss_inputs([5]))
    loss.backward()
    found = gradients(model)

    plain_image, plain_text = model.visual(images), model.text(texts)  # the hook is off again
    if mixes_images:
        plain_image = model.visual(0.7 * images + 0.3 * images[[4, 3, 2, 1, 0]])
    else:
        plain_text = 0.7 * plain_text + 0.3 * plain_text[[4, 3, 2, 1, 0]]
    image_features = plain_image / plain_image.norm(dim=1, keepdim=True)
    text_features = plain_text / plain_text.norm(dim=1, keepdim=True)
    expected = (
        paper_loss(image_features, text_features, 1 / model.logit_scale.exp(), 0.7) / 2
    )  # CLIP's half
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert error(found, gradients(model)) < EXACT


@pytest.mark.parametrize(
    "tower",
    [
        bert_clip,
        partial(stock_clip, open_clip.CustomTextCLIP),
        stock_clip,
        partial(stock_clip, pool_type="last", proj_bias=True),
        partial(stock_clip, pool_type="eos", eos_id=3),
    ],
)
def test_text_is_mixed_before_its_normalisation_and_only_within_a_step(tower):
    model, unit = tower().eval(), torch.nn.functional.normalize
    mixup = attached(model)
    mixup.attach(model)  # a second time changes nothing
    texts = batches([4])[0][1]
    with torch.no_grad():
        plain = model.encode_text(texts)
        with mixup.applied(Mix(False, 0.6)):
            mixed = model.encode_text(texts, normalize=True)
        torch.testing.assert_close(mixed, unit(0.6 * plain + 0.4 * plain.flip(0), dim=-1))
        # Negative control: normalised first it is another thing.
        first = unit(plain, dim=-1)
        assert (mixed - unit(0.6 * first + 0.4 * first.flip(0), dim=-1)).abs().max() > 1e-5
        with mixup.applied(Mix(True, 0.6)):
            assert torch.equal(model.encode_text(texts), plain)
        with pytest.raises(RuntimeError, match="inside"), mixup.applied(Mix(False, 0.6)):
            raise RuntimeError("inside")
        assert torch.equal(model.encode_text(texts), plain)
        mixup.detach()
        assert not any(module._forward_hooks for module in model.modules())


def test_rows_in_low_precision_are_mixed_in_fp32():
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = (0.3 * rows.double() + 0.7 * rows.double().flip(0)).bfloat16()
    for weight in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        mixed = mix_rows(rows, weight)
        torch.testing.assert_close(mixed, wanted, rtol=2**-8, atol=1e-6)
    with pytest.raises(UserError, match="floating-point"):
        mix_rows(torch.zeros(2, 3, dtype=torch.uint8), 0.5)


# --- draws -----------------------------------------------------------------------------------------------------------


def test_coins_are_fair_and_lambdas_beta():
    """Binomial and Beta(0.1, 0.1) moments at 5 standard errors of 20,000 draws; variance 1 / (4 (2 alpha + 1))."""
    n, mixup = 20_000, CoinFlipMixup(0.1, seed=3)
    seen = [mixup.draw() for _ in range(n)]
    weights = np.array([mix.weight for mix in seen])
    assert abs(np.mean([mix.mixes_images for mix in seen]) - 0.5) < 5 * 0.5 / math.sqrt(n)
    variance = 1 / (4 * 1.2)
    assert abs(weights.mean() - 0.5) < 5 * math.sqrt(variance / n)
    assert abs(weights.var() - variance) < 0.005
    assert ((weights >= 0) & (weights <= 1)).all()
    images = weights[[mix.mixes_images for mix in seen]]
    assert abs(images.mean() - 0.5) < 0.03  # lambda does not depend on the coin


def test_draws_are_a_function_of_seed_and_step_alone():
    """A resumed run repeats coins and lambdas from its step on, and torch's and NumPy's own numbers stay as they are."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    whole, resumed, other = (CoinFlipMixup(seed=seed) for seed in (5, 5, 2))
    drawn = [whole.draw() for _ in range(10)]
    assert [resumed.draw() for _ in range(6)] == drawn[:6] != [other.draw() for _ in range(6)]
    resumed.seek(4)
    assert [resumed.draw() for _ in range(6)] == drawn[4:]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attached(torch.nn.Linear(2, 2)), "Linear has none"),
        (lambda: attached(stock_clip(open_clip.CustomTextCLIP, output_tokens=True)), "tokens"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


# --- under decoupled gradient accumulation ---------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_open_clips_plain_class_is_mixed_exactly(compiled):
    """With the text module of `CustomTextCLIP` and the same weights, one graph; the plain class decoupled, compiled too."""
    sizes, mix = [3, 2, 4], Mix(mixes_images=False, weight=0.35)
    plain, custom = (stock_clip(kind) for kind in (open_clip.CLIP, open_clip.CustomTextCLIP))
    names = {name: name.removeprefix("text.") for name in custom.state_dict()}
    custom.load_state_dict({name: plain.state_dict()[of] for name, of in names.items()})
    micro_batches, loss_inputs = batches(sizes), mix.loss_inputs(sizes)
    torch.manual_seed(7)
    with attached(custom).applied(mix):
        _, wanted = one_graph(custom, ContrastiveLoss(), micro_batches, **loss_inputs)
    mixup = attached(plain)
    torch._dynamo.reset()
    model = torch.compile(plain, backend="eager", fullgraph=True) if compiled else plain
    dga = DecoupledGradientAccumulation(model, ContrastiveLoss(), check="always")
    torch.manual_seed(7)
    with mixup.applied(mix):
        dga.backward(micro_batches, **loss_inputs)
    wanted = {name.removeprefix("text."): gradient for name, gradient in wanted.items()}
    assert error(gradients(plain), wanted) < EXACT


@pytest.mark.parametrize("mixes_images", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_decoupled_accumulation_gives_the_one_graph_gradient(mixes_images, frozen):
    """With the text tower frozen, too; without the second positive it is another gradient."""
    sizes, mix, model = [3, 2, 4, 1], Mix(mixes_images, 0.35), bert_clip()
    model.text.requires_grad_(not frozen)
    given, inputs = {"prepare": mix.prepare}, mix.loss_inputs(sizes)
    with attached(model).applied(mix):
        _, wanted = reference(model, ContrastiveLoss(), batches(sizes), **given, **inputs)
        for retain, of_loss in ((0, inputs), (1, inputs), (4, inputs), (1, {})):
            _, found = accumulated(
                model, ContrastiveLoss(chunk_size=3), batches(sizes), **given, loss_inputs=of_loss,
                retain=retain, check="always",
            )  # fmt: skip
            assert (error(found, wanted) <= EXACT) == bool(of_loss)
