"""`RecipeStep`: what the model is given, and in which precision; the loss that the flags ask for.

`--sort-text`: texts sorted by length over a step's micro-batches and cut give the gradient of the texts as they came.
"""

from __future__ import annotations

from functools import partial

import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from open_clip_train.precision import get_autocast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import normalize
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss, reversed_partner
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.step import (
    RecipeStep,
    autocast_of,
    loss_inputs_of,
    sort_texts,
    text_padding,
)
from support.dga_reference import (
    CONTEXT,
    VOCABULARY,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
)
from support.two_towers import stock_clip
from training.params import parse
from training.train import create_loss


def test_a_step_mixes_images_by_the_draw_of_its_number_before_they_are_cast():
    """A resumed run begins with another step than the first. Mixing bf16 numbers rounds twice, and differs."""
    model, floats = bert_clip(torch.bfloat16), partial(normalize, mean=(0.5,) * 3, std=(0.3,) * 3)
    mixup, drawn = CoinFlipMixup(1.0, seed=5), CoinFlipMixup(1.0, seed=5)
    mixup.attach(model)
    step = RecipeStep(
        model, ContrastiveLoss(), torch.optim.SGD(model.parameters(), lr=0.0), precision="pure_bf16", normalize=floats,
        mixup=mixup,
    )  # fmt: skip
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    (images, texts), *_ = batches([4], torch.float32)
    pixels = (images * 64 + 128).clamp(0, 255).byte()
    mixed = 0
    for number in (7, 5, 6, 2):
        seen.clear()
        step.take([(pixels, texts)] * 2, number)
        drawn.seek(number)
        mix, half = drawn.draw(), floats(pixels).bfloat16()
        wanted = mix.prepare(floats(pixels), texts)[0].bfloat16()
        assert len(seen) == 3 and all(torch.equal(wanted, each) for each in seen)
        mixed += not torch.equal(wanted, mix.prepare(half, texts)[0])
    assert mixed  # negative control


@pytest.mark.parametrize("precision", ["fp32", "amp", "amp_bf16", "amp_bfloat16", "pure_bf16"])
def test_a_forward_pass_has_the_precision_of_open_clips_program(precision):
    rows, dtypes = torch.ones(2, 2), []
    for context in (autocast_of(precision, rows.device), get_autocast(precision, "cpu")):
        with context():
            dtypes.append((rows @ rows).dtype)
    # its main has fp16 for amp on a GPU alone
    assert dtypes[0] == (torch.float16 if precision == "amp" else dtypes[1])


def test_ids_of_a_step_are_those_of_its_samples():
    """Micro-batches of two samples and one."""
    origins = [[[0, 5, 10, 20], [1, 6, 11, 21]], [[0, 7, 12, 22]]]
    micro_batches = [
        (torch.zeros(len(origin), 3, 8, 8), origin[:, 2:3], origin)
        for origin in map(torch.tensor, origins)
    ]
    inputs = loss_inputs_of(micro_batches)
    assert {name: ids.tolist() for name, ids in inputs["ids"].items()} == {
        "source": [0, 1, 0], "image": [20, 21, 22], "caption": [10, 11, 12],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kind", "chunk_size"),
    [
        ("--siglip --dga-steps 2", SigLipLoss, None),
        ("--siglip --loss-chunk 8", SigmoidLoss, 8),
        ("--siglip --positives caption", SigmoidLoss, None),
        ("--loss-chunk 8", ContrastiveLoss, 8),
        ("--positives both", ContrastiveLoss, None),
        ("--ablate detached-gather", ContrastiveLoss, None),
    ],
)
def test_the_loss_that_the_flags_ask_for(line, kind, chunk_size):
    args, config = parse(["--train-data", "a=/x", *line.split()])
    args.rank, args.world_size, args.distill = 1, 2, False
    loss = create_loss(config, args)
    assert type(loss) is kind and (loss.rank, loss.world_size) == (1, 2)
    assert (
        getattr(loss, "chunk_size", None) or None
    ) == chunk_size  # of open_clip 4's own loss 0: all rows
    if kind is not SigLipLoss:
        assert loss.positives == (config.positives or "pair")
        assert getattr(loss, "gather_grad", True) == (not config.ablate)


# --- texts of similar length ----------------------------------------------------------------------------------------

SIZES = [4, 5, 3]
EXACT = 1e-12


clip = partial(stock_clip, open_clip.CustomTextCLIP, layers=2)
MODELS = {"BERT": bert_clip, "open_clip": clip}


def padded(sizes=SIZES, seed=1):
    """Micro-batches whose texts have 3 to `CONTEXT` tokens, the last of them the largest, and padding 0."""
    micro_batches = batches(sizes, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, texts in micro_batches:
        ends = torch.randint(3, CONTEXT + 1, (len(texts), 1), generator=generator)
        texts.clamp_(max=VOCABULARY - 2)
        texts[torch.arange(CONTEXT) == ends - 1] = VOCABULARY - 1
        texts[torch.arange(CONTEXT) >= ends] = 0
    return micro_batches


def sorted_and_cut(micro_batches):
    texts, order = sort_texts([texts for _, texts in micro_batches], 0)
    return [(images, part) for (images, _), part in zip(micro_batches, texts, strict=True)], order


def test_texts_are_sorted_and_cut():
    first = torch.tensor(
        [[1, 2, 9, 0, 0], [1, 2, 3, 4, 9], [1, 0, 2, 9, 0]]
    )  # 0 is a token of open_clip's, too
    second = torch.tensor([[1, 9, 0, 0, 0], [0, 0, 0, 0, 0]])
    (short, long), order = sort_texts([first, second], 0)
    assert order.tolist() == [4, 3, 0, 2, 1]
    assert short.tolist() == [[0, 0, 0], [1, 9, 0], [1, 2, 9]]
    assert long.tolist() == [[1, 0, 2, 9, 0], [1, 2, 3, 4, 9]]
    (_, cut), _ = sort_texts([second[1:], first[2:]], 0)
    assert cut.tolist() == [[1, 0, 2, 9]]  # up to the last token, not to the number of tokens


@pytest.mark.parametrize("retain", [0, 1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_without_dropout_the_gradient_is_that_of_texts_as_they_came(kind, retain):
    model, micro_batches = MODELS[kind]().eval(), padded()
    assert text_padding(model) == 0
    _, wanted = one_graph(model, ClipLoss(), micro_batches)
    short, order = sorted_and_cut(micro_batches)
    assert short[0][1].shape[1] < CONTEXT
    dga = DecoupledGradientAccumulation(
        model, ContrastiveLoss(chunk_size=5), retain=retain, check="always"
    )
    dga.backward(short, text_order=order)
    assert error(gradients(model), wanted) <= EXACT
    dga.backward(short)
    assert error(gradients(model), wanted) > 0.1  # negative control: texts left with other images


@pytest.mark.parametrize("mixes_images", [False, True])
def test_mixup_knows_the_partners_of_sorted_texts(mixes_images, monkeypatch):
    """The reference has the pairs sorted, images with their texts, for the loss does not mind the order of pairs."""
    model, micro_batches, mix = bert_clip().eval(), padded(), Mix(mixes_images, 0.3)
    mixup = CoinFlipMixup()
    mixup.attach(model)
    _, order = sorted_and_cut(micro_batches)
    images, texts = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    rows = torch.arange(sum(SIZES)) if mixes_images else order
    pairs = list(zip(images[rows].split(SIZES), texts[rows].split(SIZES), strict=True))
    targets = {"mixup_lambda": 0.3, "partner": reversed_partner(SIZES)}
    with mixup.applied(mix):
        _, wanted = one_graph(model, ContrastiveLoss(), pairs, prepare=mix.prepare, **targets)

    monkeypatch.setattr(mixup, "draw", lambda: mix)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), {}
    optimizer.zero_grad = lambda: None
    for sort_text in (True, False):
        step = RecipeStep(
            model, ContrastiveLoss(), optimizer, precision="fp32", mixup=mixup, sort_text=sort_text,
        )  # fmt: skip
        step.take(micro_batches, 0)
        found[sort_text] = gradients(model)
    assert error(found[True], wanted) <= EXACT
    assert mixes_images or error(found[False], wanted) > 1e-3  # unsorted, the partners differ


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (stock_clip, "build the model with --force-custom-text"),
        (lambda: clip(no_causal_mask=True, pool_type="last"), "takes the last place"),
        (lambda: clip(no_causal_mask=True, pool_type="first"), "looks at padding"),
    ],
)
def test_towers_whose_texts_cannot_be_cut_are_refused(model, words):
    with pytest.raises(UserError, match=words):
        text_padding(model())


@pytest.mark.parametrize("pooled", ["argmax", "first"])
def test_a_causal_tower_takes_cut_texts(pooled):
    assert text_padding(clip(pool_type=pooled)) == 0


@pytest.mark.parametrize(
    "order", [torch.arange(7), torch.zeros(12, dtype=torch.long), torch.arange(12.0)], ids=str
)
def test_an_order_that_is_not_a_permutation_is_refused(order):
    model = bert_clip()
    with pytest.raises(UserError, match=r"text_order must hold each of 0..11 once"):
        DecoupledGradientAccumulation(model, ContrastiveLoss()).backward(padded(), text_order=order)
    assert all(parameter.grad is None for parameter in model.parameters())
