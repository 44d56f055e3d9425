"""`RecipeStep`: training's loop and a loop around the step prepare the same micro-batches alike and take the same step.

`--sort-text`: texts sorted by length over a step's micro-batches and cut give the gradient of the texts as they came.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace

import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, seed_step, stream_seed
from open_clip_zerovl.data.images import normalize, split_normalize
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss, reversed_partner
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.recipe.build import apply_methods
from open_clip_zerovl.recipe.flags import AllFlags, RecipeConfig
from open_clip_zerovl.recipe.mixup import CoinFlipMixup, Mix
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import RecipeStep, loss_inputs_of, sort_texts, text_padding
from support.dga_reference import (
    CONTEXT,
    VOCABULARY,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
)
from support.tiny_clip import NATIVE_VISION, bert_text, register, write_bert
from support.two_towers import stock_clip
from training.log import RunLog
from training.params import parse
from training.train import Trainer, create_loss

STEPS, K, SEED = 8, 2, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("step")
    return register(
        folder / "configs", "step-tiny", NATIVE_VISION, bert_text(write_bert(folder / "bert"))
    )


def planned_of(model: str, precision: str) -> SimpleNamespace:
    """Build a model as training does, with random weights: what its step and its micro-batches are made of."""
    torch.manual_seed(0)
    built, transform, _ = create_model_and_transforms(
        model, None, precision=precision, pretrained_image=False, output_dict=True
    )
    methods = RecipeConfig(coin_flip_mixup=True, mixup_alpha=1.0)
    _, mixup = apply_methods(built, transform, methods, seed=SEED)
    _, mean, std = split_normalize(transform)
    texts = open_clip.get_tokenizer(model)(["a photo of a cat beside two dogs on the road"] * 4)
    prepared = partial(normalize, mean=mean, std=std)
    return SimpleNamespace(
        model=built.train(), normalize=prepared, texts=texts, mixup=mixup, precision=precision
    )


def adamw(planned: SimpleNamespace, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(planned.model, 0.2), lr=lr)


def step_of(planned: SimpleNamespace, lr: float = 0.0, **options: float) -> RecipeStep:
    """Make training's step, of one rank."""
    return RecipeStep(
        planned.model, ContrastiveLoss(), adamw(planned, lr), precision=planned.precision, normalize=planned.normalize,
        mixup=planned.mixup, **options,
    )  # fmt: skip


def what_it_sees(planned: SimpleNamespace) -> list[torch.Tensor]:
    """All images and tokens that the model is called with from now on, in order."""
    seen: list[torch.Tensor] = []
    planned.model.register_forward_pre_hook(
        lambda _, inputs: seen.extend(part.clone() for part in inputs)
    )
    return seen


def groups_of(planned: SimpleNamespace) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    texts = planned.texts
    images = torch.randint(0, 256, (STEPS, K, 4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return [[(images[step, k], texts) for k in range(K)] for step in range(STEPS)]


def train(
    planned: SimpleNamespace,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    clip: float | None = None,
) -> None:
    """One epoch of training's loop over `groups_of`."""
    batches = [pair for group in groups_of(planned) for pair in group]

    class Loader(list):
        num_batches, num_samples = STEPS, 4 * len(batches)

    data = SimpleNamespace(
        dataloader=Loader(batches), normalize=planned.normalize, set_epoch=lambda epoch: None
    )
    args = argparse.Namespace(
        device="cpu", precision=planned.precision, seed=SEED, rank=rank, world_size=1, distributed=False, batch_size=4,
        workers=0, skip_scheduler=True, grad_clip_norm=clip, log_every_n_steps=1, wandb=False,
        checkpoint_path="/nowhere", name="x", save_logs=False, log_local=False, train_num_samples=None,
        dataset_resampled=False, model="x", epochs=1, siglip=False, resume=None,
    )  # fmt: skip
    config = AllFlags(sampling="random", dga_steps=K)
    never = SimpleNamespace(agreed=lambda distributed: False)
    trainer = Trainer(config, never, RunLog(args, config), mixup=planned.mixup)
    trainer(planned.model, {"train": data}, ContrastiveLoss(), 0, optimizer, None, None, args)


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16", "amp_bf16"])
def test_training_and_a_loop_of_ones_own_prepare_and_step_alike(model, precision):
    """Same inputs, same seeds: bit-equal model inputs in both of DGA's passes, bit-equal weights after eight steps."""
    seen, weights = [], []
    for program in ("training", "a loop"):
        planned = planned_of(model, precision)
        seen.append(what_it_sees(planned))
        if program == "training":
            train(planned, adamw(planned, 1e-3), clip=1.0)
        else:
            taken = step_of(planned, 1e-3, grad_clip_norm=1.0)
            for step, group in enumerate(groups_of(planned)):
                seed_step(SEED, step, 0)
                taken.take(group, step)
        weights.append(planned.model.state_dict())
    assert len(seen[0]) == len(seen[1]) == STEPS * (2 * K - 1) * 2
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*seen, strict=True))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    start = planned_of(model, precision).model.state_dict()
    assert not all(torch.equal(weights[0][name], start[name]) for name in start)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_draws_masks_of_its_own(model, rank):
    """Else samples in the same row on two ranks would lose the same tokens."""
    planned = planned_of(model, "fp32")
    train(planned, adamw(planned), rank)
    assert torch.initial_seed() == stream_seed(SEED, Purpose.MODEL, STEPS - 1, rank)


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


def test_a_step_draws_the_mix_of_its_number(model, monkeypatch):
    """A resumed run begins with another step than the first."""
    planned = planned_of(model, "fp32")
    drawn, draw = [], planned.mixup.draw
    monkeypatch.setattr(planned.mixup, "draw", lambda: drawn.append(draw()) or drawn[-1])
    step_of(planned).take(groups_of(planned)[0], 5)
    wanted = CoinFlipMixup(1.0, seed=SEED)
    first = wanted.draw()
    wanted.seek(5)
    assert drawn == [wanted.draw()] != [first]


def test_images_are_mixed_before_they_are_cast(model):
    """lambda's sum is taken in fp32: mixing bf16 numbers rounds twice, and differs."""
    planned = planned_of(model, "pure_bf16")
    taken = step_of(planned, retain=K)
    seen = what_it_sees(planned)
    groups = groups_of(planned)
    for step, group in enumerate(groups):
        taken.take(group, step)
    planned.mixup.seek(0)
    mixed = 0
    for step, group in enumerate(groups):
        mix = planned.mixup.draw()
        for k, (images, texts) in enumerate(group):
            floats = planned.normalize(images)
            assert torch.equal(
                seen[2 * (K * step + k)], mix.prepare(floats, texts)[0].to(torch.bfloat16)
            )
            mixed += not torch.equal(
                seen[2 * (K * step + k)], mix.prepare(floats.to(torch.bfloat16), texts)[0]
            )
    assert mixed  # negative control


@pytest.mark.parametrize(
    ("line", "kind", "chunk_size"),
    [
        ("--siglip --dga-steps 2", SigLipLoss, None),
        ("--siglip --loss-chunk 8", SigmoidLoss, 8),
        ("--siglip --positives caption", SigmoidLoss, None),
        ("--loss-chunk 8", ContrastiveLoss, 8),
        ("--positives both", ContrastiveLoss, None),
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_says_that_it_gathers_nothing(ranks, caplog):
    args, config = parse(["--train-data", "a=/x", "--ablate", "detached-gather"])
    args.rank, args.world_size = 0, ranks
    assert not create_loss(config, args).gather_grad
    assert ("changes nothing in one process" in caplog.text) == (ranks == 1)


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
