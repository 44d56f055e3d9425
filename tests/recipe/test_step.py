"""`RecipeStep`: training's loop and a loop around the step prepare the same micro-batches alike and take the same step."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch
from open_clip.loss import SigLipLoss

from open_clip_zerovl.core.randomness import Purpose, seed_step, stream_seed
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.step import loss_inputs_of
from support.recipe_model import RecipeModel, recipe_model
from support.tiny_clip import NATIVE_VISION, bert_text, register, write_bert
from training.log import RunLog
from training.params import parse
from training.train import Trainer, create_loss

CPU = torch.device("cpu")
STEPS, K, SEED = 8, 2, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("step")
    return register(
        folder / "configs", "step-tiny", NATIVE_VISION, bert_text(write_bert(folder / "bert"))
    )


def planned_of(model: str, precision: str) -> RecipeModel:
    torch.manual_seed(0)
    config = AllFlags(model=model, coin_flip_mixup=True, mixup_alpha=1.0, seed=SEED)
    return recipe_model(config, seed=SEED, precision=precision)


def what_it_sees(planned: RecipeModel) -> list[torch.Tensor]:
    """All images and tokens that the model is called with from now on, in order."""
    seen: list[torch.Tensor] = []
    planned.model.register_forward_pre_hook(
        lambda _, inputs: seen.extend(part.clone() for part in inputs)
    )
    return seen


def groups_of(planned: RecipeModel) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    texts = planned.texts(4)
    images = torch.randint(0, 256, (STEPS, K, 4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return [[(images[step, k], texts) for k in range(K)] for step in range(STEPS)]


def train(
    planned: RecipeModel, optimizer: torch.optim.Optimizer, rank: int = 0, clip: float | None = None
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
        optimizer = planned.optimizer(1e-3)
        taken = planned.step(optimizer, 1, grad_clip_norm=1.0)
        if program == "training":
            train(planned, optimizer, clip=1.0)
        else:
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
    train(planned, planned.optimizer(), rank)
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
    recipe = planned.step(planned.optimizer(), 1)
    recipe.take(groups_of(planned)[0], 5)
    wanted = CoinFlipMixup(1.0, seed=SEED)
    first = wanted.draw()
    wanted.seek(5)
    assert drawn == [wanted.draw()] != [first]


def test_images_are_mixed_before_they_are_cast(model):
    """lambda's sum is taken in fp32: mixing bf16 numbers rounds twice, and differs."""
    planned = planned_of(model, "pure_bf16")
    taken = planned.step(planned.optimizer(), K)
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
