"""What a step over real gloo processes does beside its exact gradient (test_random_steps.py): refusals, memory, hooks.

The processes of one world size run everything, since starting them costs more than the steps. Under torchrun this file is the
program: `test_ranks.py FOLDER [STEP ...]`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss
from torch.nn.parallel import DistributedDataParallel

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.retain import AUTO_SHARE, Retention
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import TOLERANCE, batches, bert_clip, error, gradients, one_graph
from support.programs import run_ranks
from support.two_towers import Adapter

EXACT = TOLERANCE[torch.float64]
STEPS = ("an ordinary loop", "detached gather")
SLOW_STEPS = ("compiled DDP", "compiled DDP, frozen text")


def batches_of(step: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return batches([4 + rank] if step == "an ordinary loop" else [3, 2, 3], seed=rank)


def model_of(step: str) -> torch.nn.Module:
    model = bert_clip()
    model.text.requires_grad_("frozen text" not in step)
    return model


def taken(step: str, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The gradients as this rank has them after synchronisation."""
    model = model_of(step)
    wrapped = DistributedDataParallel(model)
    loss = ContrastiveLoss(gather_grad="detached" not in step, rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    if step == "an ordinary loop":
        loss(**wrapped(*batches_of(step, rank)[0])).backward()
    else:  # the wrapping is tested here, not the code generator
        compiled = torch.compile(wrapped, backend="aot_eager") if "compiled" in step else wrapped
        DecoupledGradientAccumulation(compiled, loss).backward(batches_of(step, rank))
    return gradients(model)


def reference(step: str, world_size: int) -> dict[str, torch.Tensor]:
    """Those of one graph over all ranks' micro-batches, each rank's under its random state."""
    micro_batches, states = [], []
    for rank in range(world_size):
        torch.manual_seed(rank)
        of_rank = batches_of(step, rank)
        micro_batches += of_rank
        states += [torch.get_rng_state()] + [None] * (len(of_rank) - 1)
    loss = partial(detached_gather, world_size) if "detached" in step else ClipLoss()
    return one_graph(model_of(step), loss, micro_batches, rng_states=states)[1]


def detached_gather(world_size, image_features, text_features, logit_scale, output_dict):
    """The mean over virtual ranks of local losses whose keys are constants, the rank's own too, as in the released code."""
    total = 0.0
    sides = image_features, text_features
    for queries, keys in (sides, sides[::-1]):
        for number, of_rank in enumerate(queries.chunk(world_size)):
            labels = torch.arange(len(of_rank)) + number * len(of_rank)
            logits = logit_scale * of_rank @ keys.detach().T
            total = total + torch.nn.functional.cross_entropy(logits, labels)
    return {"contrastive_loss": total / (2 * world_size)}


# an attempt that cannot be right -> a part of the sentence about it
REFUSED = {
    "local_loss": "gather_with_grad=True or use ContrastiveLoss",
    "world_size": "made for world_size=1, but the model's gradients are averaged over ",
    "world_size in a partial": "made for world_size=1, but the model's gradients are averaged over ",
    "static_graph": "static_graph",
    "a parameter outside": "trains own outside of it",
    "no DDP": "but the model's gradients are averaged over 1 rank",
    "retain": "at most 1 (over several ranks one must be replayed",
    "ragged ClipLoss": "as many samples on each",
    "a term that learns a tensor": "DistributedDataParallel does not average",
    "a term that learns": "DistributedDataParallel does not average",
    "other terms": "terms= must return the same names on every rank",
    "terms of one rank": "terms= must return the same names on every rank",
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    ranks = {"rank": rank, "world_size": world_size}
    model, ours = DistributedDataParallel(bert_clip()), ContrastiveLoss(**ranks)
    outside = Adapter(DistributedDataParallel(bert_clip()))
    outside.own = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    plain = torch.ones((), dtype=torch.float64, requires_grad=True)
    names = {"other terms": ["mine", "more"] if rank == 0 else [f"of {rank}"]}
    names["terms of one rank"] = ["mine"] if rank == 0 else []
    attempts: dict[str, tuple[Any, ...]] = {
        "local_loss": (model, ClipLoss(local_loss=True, **ranks)),
        "world_size": (model, ClipLoss()),
        "world_size in a partial": (model, partial(ContrastiveLoss())),
        "static_graph": (DistributedDataParallel(bert_clip(), static_graph=True), ours),
        "a parameter outside": (outside, ours),
        "no DDP": (bert_clip(), ours),
        "retain": (model, ours, None, 2),
        "ragged ClipLoss": (model, ClipLoss(gather_with_grad=True, **ranks)),
        "a term that learns a tensor": (
            model, ours, lambda outputs, *_: {"head": (outputs["image_features"] * plain).sum()},
        ),
        "a term that learns": (
            model, ours, lambda outputs, *_: {"head": (outputs["image_features"] @ outside.own).sum()},
        ),
        **{
            name: (
                DistributedDataParallel(bert_clip()), ours,
                lambda outputs, *_, of=of: dict.fromkeys(of, outputs["image_features"].sum()),
            )
            for name, of in names.items()
        },
    }  # fmt: skip
    seen = {}
    for name, (of, loss, *options) in attempts.items():
        given = dict(zip(("terms", "retain"), options, strict=False))
        try:
            step = DecoupledGradientAccumulation(of, loss, **given)
            step.backward(batches([2, 2 + rank * name.startswith("ragged")]))
        except UserError as refusal:
            seen[name] = str(refusal)
    return seen


def replay_error(rank: int, world_size: int) -> str:
    """One rank's `prepare` is not deterministic; no rank may be left waiting."""
    dga = DecoupledGradientAccumulation(
        DistributedDataParallel(bert_clip()), ContrastiveLoss(rank=rank, world_size=world_size)
    )
    calls = [0]

    def prepare(images, texts):
        calls[0] += 1
        return images * (calls[0] if rank == 1 else 1), texts

    try:
        dga.backward(batches([3, 3]), prepare=prepare)
    except ReplayError as caught:
        return str(caught)
    return "no error"


def graphs_kept(rank: int, world_size: int) -> list[int]:
    """By retain="auto", before it can decide and after; the second rank has memory for three graphs, the rest for five."""
    sizes, retention = [2] * 6, Retention("auto", torch.device("cpu"), world_size)
    kept = [retention.graphs(sizes)]
    with retention.measured(2):
        graph = torch.zeros(1000)
    retention.step_done(sizes)
    others = 2 if rank == 1 else 4
    free = (
        (2 + others + 0.5) * graph.nbytes / AUTO_SHARE
    )  # two graphs' worth is set aside for the step itself
    with mock.patch("open_clip_zerovl.dga.retain.available_bytes", lambda device: free):
        return [*kept, retention.graphs(sizes)]


def full_memory(rank: int, world_size: int) -> tuple[float, list[int]]:
    """The error of a step in which rank 1's memory is full at its third graph, and the graphs of each rank before and after."""
    model, calls = bert_clip(), []
    wrapped, loss = (
        DistributedDataParallel(model),
        ContrastiveLoss(rank=rank, world_size=world_size),
    )

    def full(*_: Any) -> None:
        calls.append(1)
        if rank == 1 and len(calls) == 4:  # the first of four micro-batches has no graph
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def after_step(dga: DecoupledGradientAccumulation) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)
        dga.backward(batches([2, 2, 2, 2], seed=rank))
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return gradients(model)

    wanted = after_step(DecoupledGradientAccumulation(wrapped, loss))
    auto = DecoupledGradientAccumulation(wrapped, loss, retain="auto")
    with mock.patch("open_clip_zerovl.dga.retain.available_bytes", lambda device: 1e15):
        after_step(auto)
        kept = [auto.decision().graphs]
        model.register_forward_pre_hook(full)
        found = after_step(auto)
    return error(found, wanted), [*kept, auto.decision().graphs]


def hooked(rank: int, world_size: int, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Gradients and seen norms under a clamp, of the same pairs in one micro-batch or several; without dropout."""
    model, seen = bert_clip().eval(), []
    model.text.proj.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.visual.proj.register_hook(lambda gradient: seen.append(gradient.norm()))
    images, texts = batches([7], seed=rank)[0]
    loss = ContrastiveLoss(rank=rank, world_size=world_size)
    DecoupledGradientAccumulation(DistributedDataParallel(model), loss).backward(
        list(zip(images.split(sizes), texts.split(sizes), strict=True))
    )
    return {name: p.grad for name, p in model.named_parameters()} | {"norms": torch.stack(seen)}


def start(world_size: int, folder: Any, *steps: str) -> list[dict[str, Any]]:
    run_ranks(world_size, __file__, str(folder), *steps, timeout=600)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """(W, the result of each rank). Four ranks are slow: four processes on a core or two."""
    return request.param, start(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("step", STEPS)
def test_every_rank_has_the_gradient_of_one_graph(ranks, step):
    world_size, found = ranks
    for of_rank in found:
        assert error(of_rank[step], reference(step, world_size)) <= EXACT


@pytest.mark.slow  # two processes trace two graphs each, forward and backward
def test_compiled_ddp(tmp_path):
    for of_rank in start(2, tmp_path, *SLOW_STEPS):
        for step in SLOW_STEPS:
            assert error(of_rank[step], reference(step, 2)) <= EXACT


def test_what_cannot_be_right_over_ranks_is_refused(ranks):
    _, found = ranks
    for of_rank in found:
        assert of_rank["refusals"].keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert words in of_rank["refusals"][name], name


def test_hooks_act_once_on_each_ranks_gradient_before_the_average(ranks):
    """As in a plain DDP step of the same pairs."""
    _, found = ranks
    for of_rank in found:
        plain, decoupled = of_rank["hooks"]
        assert error(decoupled, plain) <= EXACT and plain["norms"].shape == (1,)


def test_every_rank_keeps_as_many_graphs_as_the_one_with_the_least_memory(ranks):
    _, found = ranks
    assert [of_rank["graphs kept"] for of_rank in found] == [[1, 3]] * len(found)


def test_a_full_memory_costs_its_rank_a_graph_and_no_rank_the_run(ranks):
    _, found = ranks
    for rank, of_rank in enumerate(found):
        wrong, kept = of_rank["full memory"]
        assert wrong <= EXACT and kept == [3, 2 if rank == 1 else 3]


def test_a_failed_replay_stops_every_rank(ranks):
    _, found = ranks
    assert "Replayed image_features of micro-batch 0 differ" in found[1]["replay error"]
    assert "Another rank's replayed outputs" in found[0]["replay error"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # where a refusal is missing
    here = dist.get_rank(), dist.get_world_size()
    folder, *chosen = sys.argv[1:]
    results: dict[str, Any] = {step: taken(step, *here) for step in chosen or STEPS}
    if not chosen:
        results["refusals"] = refusals(*here)
        results["replay error"] = replay_error(*here)
        results["graphs kept"] = graphs_kept(*here)
        results["full memory"] = full_memory(*here)
        results["hooks"] = [hooked(*here, sizes) for sizes in ([7], [3, 2, 2])]
    torch.save(results, f"{folder}/{here[0]}.pt")
    dist.barrier()
    dist.destroy_process_group()
