"""Decoupled gradient accumulation over real gloo processes against one graph in one process, in fp64.

Options of our loss, wrappers, refusals and controls. What the random steps over two ranks in test_random_steps.py draw is no
case of its own here, and each pair of an option with a form of the batch stands in one case at least. Each case runs two
optimizer steps in W ranks under DistributedDataParallel. The reference forwards every rank's
micro-batches one after another in one process, each rank's under that rank's random state, and takes one loss over all.
The processes of one world size run all cases, since starting them costs more than the cases. Under torchrun this file is
the program: `test_ranks.py FOLDER CASE ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss, SigLipLoss
from torch.nn.parallel import DistributedDataParallel

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.retain import AUTO_SHARE, Retention
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss, reversed_partner
from support.dense_loss import DenseLoss, sample_ids
from support.dga_reference import TOLERANCE, batches, bert_clip, error, one_graph
from support.programs import run_ranks
from support.two_towers import tokens_and_experts

STEPS = 2
EXACT = TOLERANCE[torch.float64]


@dataclass(frozen=True)
class Case:
    loss: Callable[..., Any]  # called with rank and world_size
    reference_loss: Callable[..., Any] = ClipLoss
    sizes: Callable[[int], list[int]] = lambda rank: [3, 2, 3]
    retain: int | str = 1
    mixup_lambda: float | None = None
    model: dict[str, Any] = field(default_factory=dict)
    freeze: str | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    dga: dict[str, Any] = field(default_factory=dict)
    use_dga: bool = True
    compile: bool = False
    adapter: bool = False  # the model in DDP is inside of a module that is not
    shuffle_texts: bool = (
        False  # texts in another order than images; without dropout, whose masks would differ
    )
    options: dict[str, Any] = field(default_factory=dict)  # of our loss and of its dense reference
    terms: Callable[..., Any] | None = None
    second_view: bool = False  # a further feature of each image

    def build(self) -> torch.nn.Module:
        model = bert_clip(**self.model)
        if self.second_view:
            model = WithSecondView(model)
        if self.freeze:
            getattr(model, self.freeze).requires_grad_(False)
        return model.eval() if self.shuffle_texts else model

    def loss_inputs(self, rank: int, step: int) -> dict[str, Any]:
        """Inputs of this rank's loss besides features."""
        sizes, seed = self.sizes(rank), 1000 * step + rank
        inputs: dict[str, Any] = {}
        if self.options:
            inputs["ids"] = sample_ids(sum(sizes), seed)
        if self.mixup_lambda is not None:
            inputs |= {"mixup_lambda": self.mixup_lambda, "partner": reversed_partner(sizes)}
            if "ids" in inputs:  # partners of one source
                inputs["ids"]["source"] = torch.minimum(
                    *(inputs["ids"]["source"][x] for x in (..., inputs["partner"]))
                )
        return inputs

    def all_loss_inputs(self, world_size: int, step: int) -> dict[str, Any]:
        """The same of all ranks' rows, in rank order."""
        each = [self.loss_inputs(rank, step) for rank in range(world_size)]
        joined = dict(each[0])
        if "ids" in joined:
            joined["ids"] = {
                name: torch.cat([one["ids"][name] for one in each]) for name in joined["ids"]
            }
        if "partner" in joined:
            joined["partner"] = reversed_partner(
                [size for rank in range(world_size) for size in self.sizes(rank)]
            )
        return joined


class WithSecondView(torch.nn.Module):
    """A CLIP that also returns a feature of each image from a head of its own."""

    def __init__(self, clip: torch.nn.Module) -> None:
        super().__init__()
        self.clip, self.head = clip, torch.nn.Linear(16, 16).double()

    def forward(self, images, texts):
        outputs = self.clip(images, texts)
        second = torch.nn.functional.normalize(self.head(outputs["image_features"]), dim=-1)
        return {**outputs, "second": second}


class ClipLossOfViews(ClipLoss):
    """open_clip's loss of the texts with each of an image's two features."""

    def forward(self, image_features, text_features, logit_scale, second, output_dict=True):
        values = [
            ClipLoss.forward(self, features, text_features, logit_scale)
            for features in (image_features, second)
        ]
        return {"first": values[0], "second": values[1]}


def ours(chunk_size: int = 3, **options: Any) -> dict[str, Any]:
    """Our loss with options, and the dense definition of the same."""
    return {
        "loss": partial(ContrastiveLoss, chunk_size=chunk_size, **options),
        "reference_loss": partial(DenseLoss, **options),
        "options": options,
    }


def ours_sigmoid(**options: Any) -> dict[str, Any]:
    """The same of our sigmoid loss, and the model that has its bias."""
    return {
        "loss": partial(SigmoidLoss, chunk_size=3, **options),
        "reference_loss": partial(DenseLoss, sigmoid=True, **options),
        "model": {"bias": True},
        "options": {"sigmoid": True, **options},
    }


def ragged(rank: int) -> list[int]:
    """Other micro-batches on each rank, and more samples on a later one: 10, 12, 12, 14."""
    return [3, 2 + rank, 1, 4 + rank % 2]


def one_micro_batch(rank: int) -> list[int]:
    return [5 + rank]


def clip_loss_in_a_partial(**ranks: int) -> Any:
    return partial(ClipLoss(**ranks))


CASES = {
    "ours, texts in another order, ragged": Case(
        partial(ContrastiveLoss, chunk_size=3), sizes=ragged, shuffle_texts=True
    ),
    "ours, retain auto": Case(ContrastiveLoss, retain="auto"),
    "ours, an adapter around DDP": Case(ContrastiveLoss, adapter=True),
    "ours, find_unused_parameters, gradients as bucket views, check always": Case(
        ContrastiveLoss,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        dga={"check": "always"},
    ),
    "ours, an ordinary DDP loop, ragged": Case(
        ContrastiveLoss, sizes=lambda rank: [4 + rank], use_dga=False
    ),
    "ClipLoss in a partial, 1/W corrected": Case(clip_loss_in_a_partial, ClipLoss),
    **{
        f"SigLipLoss, {impl}": Case(
            partial(SigLipLoss, dist_impl=impl), SigLipLoss, model={"bias": True}
        )
        for impl in ("bidir", "shift", "reduce", "gather")
    },
}
CASES |= {
    f"{name}, {sizes.__name__}": Case(sizes=sizes, **kind)
    for sizes in (ragged, one_micro_batch)
    for name, kind in {
        "same caption or picture": ours(positives="both"),
        "sigmoid, same caption or picture": ours_sigmoid(positives="both"),
    }.items()
} | {
    "same caption, ragged": Case(sizes=ragged, **ours(positives="caption")),
    "mixup, ragged, in chunks": Case(
        sizes=ragged, mixup_lambda=0.8, retain=0, **ours(chunk_size=2)
    ),
    "in another order, ragged": Case(sizes=ragged, shuffle_texts=True, **ours()),
    "ClipLoss of a further feature, 1/W corrected": Case(
        lambda **ranks: ClipLossOfViews(**ranks),
        lambda: ClipLossOfViews(),
        second_view=True,
        dga={"features": {"second": "images"}},
    ),
    "terms, an adapter around DDP, frozen text": Case(
        ContrastiveLoss, adapter=True, freeze="text", terms=tokens_and_experts
    ),
}
SLOW_CASES = {
    "ours, compiled DDP": Case(ContrastiveLoss, compile=True),
    "ours, compiled DDP, frozen text": Case(ContrastiveLoss, compile=True, freeze="text"),
}
# Cases that must come out wrong, by at least the second number.
CONTROLS = {
    "new masks in the replay": (Case(ContrastiveLoss, dga={"replay_rng": False}), 0.1),
    "sigmoid against the softmax": (
        Case(SigmoidLoss, DenseLoss, model={"bias": True}, options={"sigmoid": True}),
        0.1,
    ),
    "detached gather": (Case(partial(ContrastiveLoss, gather_grad=False)), 0.01),
    **{
        f"{name} against the plain loss": (
            Case(**ours(**options) | {"reference_loss": DenseLoss}),
            0.01,
        )
        for name, options in {
            "same caption": {"positives": "caption"},
        }.items()
    },
    "ClipLoss in an ordinary DDP loop: 1/W": (
        Case(ClipLoss, sizes=lambda rank: [4], use_dga=False),
        0.4,
    ),
}


class Adapter(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images, texts):
        return self.model(images, texts)


def rank_batches(case: Case, rank: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return batches(case.sizes(rank), seed=1000 * step + rank)


def rank_seed(rank: int, step: int) -> int:
    return 10 * step + rank


def run_case(case: Case, rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of each step, as this rank has them after synchronisation."""
    model = case.build()
    wrapped = DistributedDataParallel(model, **case.ddp) if world_size > 1 else model
    if case.compile:
        wrapped = torch.compile(
            wrapped, backend="aot_eager"
        )  # the wrapping is tested here, not the code generator
    if case.adapter:
        wrapped = Adapter(wrapped)
    loss = case.loss(rank=rank, world_size=world_size)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    dga = (
        DecoupledGradientAccumulation(
            wrapped, loss, retain=case.retain, terms=case.terms, **case.dga
        )
        if case.use_dga
        else None
    )
    found = []
    for step in range(STEPS):
        micro_batches = rank_batches(case, rank, step)
        torch.manual_seed(rank_seed(rank, step))
        if dga is not None:
            order = {}
            if case.shuffle_texts:
                images, texts = zip(*micro_batches, strict=True)
                order["text_order"] = torch.randperm(sum(case.sizes(rank)))
                texts = torch.cat(texts)[order["text_order"]].split([len(part) for part in texts])
                micro_batches = list(zip(images, texts, strict=True))
            dga.backward(micro_batches, **order, **case.loss_inputs(rank, step))
        else:
            loss(**wrapped(*micro_batches[0])).backward()
        kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({name: grad.clone() for name, grad in kept.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def reference(case: Case, world_size: int) -> list[dict[str, torch.Tensor]]:
    model = case.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(STEPS):
        micro_batches, states = [], []
        for rank in range(world_size):
            torch.manual_seed(rank_seed(rank, step))
            of_rank = rank_batches(case, rank, step)
            micro_batches += of_rank
            states += [torch.get_rng_state()] + [None] * (len(of_rank) - 1)
        inputs = case.all_loss_inputs(world_size, step)
        _, grads = one_graph(
            model,
            case.reference_loss(),
            micro_batches,
            rng_states=states,
            terms=case.terms,
            more=["second"] if case.second_view else [],
            **inputs,
        )
        found.append(grads)
        for name, parameter in model.named_parameters():
            parameter.grad = grads.get(name)
        optimizer.step()
        optimizer.zero_grad()
    return found


def run_cases(folder: str, names: list[str]) -> None:
    """Write the results of this process of a group to `RANK.pt`; with all the cases also results that belong to no case."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cases = CASES | SLOW_CASES | {name: case for name, (case, _) in CONTROLS.items()}
    found: dict[str, Any] = {name: run_case(cases[name], rank, world_size) for name in names}
    if set(CASES) <= set(names):
        found["refusals"] = refusals(rank, world_size)
        found["replay error"] = replay_error(rank, world_size)
        found["graphs kept"] = graphs_kept(rank, world_size)
        found["full memory"] = full_memory(rank, world_size)
        found["hooks"] = [hooked(rank, world_size, sizes) for sizes in ([7], [3, 2, 2])]
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def refusals(rank: int, world_size: int) -> dict[str, str]:
    model = DistributedDataParallel(bert_clip())
    outside = Adapter(DistributedDataParallel(bert_clip()))
    outside.own = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    plain = torch.ones((), dtype=torch.float64, requires_grad=True)
    attempts = {
        "local_loss": lambda: DecoupledGradientAccumulation(
            model, ClipLoss(local_loss=True, rank=rank, world_size=world_size)
        ),
        "world_size": lambda: DecoupledGradientAccumulation(model, ClipLoss()),
        "world_size in a partial": lambda: DecoupledGradientAccumulation(
            model, partial(ContrastiveLoss())
        ),
        "static_graph": lambda: DecoupledGradientAccumulation(
            DistributedDataParallel(bert_clip(), static_graph=True),
            ContrastiveLoss(rank=rank, world_size=world_size),
        ),
        "a parameter outside": lambda: DecoupledGradientAccumulation(
            outside, ContrastiveLoss(rank=rank, world_size=world_size)
        ),
        "no DDP": lambda: DecoupledGradientAccumulation(
            bert_clip(), ContrastiveLoss(rank=rank, world_size=world_size)
        ),
        "retain": lambda: DecoupledGradientAccumulation(
            model, ContrastiveLoss(rank=rank, world_size=world_size), retain=2
        ).backward(batches([2, 2])),
        "ragged ClipLoss": lambda: DecoupledGradientAccumulation(
            model, ClipLoss(gather_with_grad=True, rank=rank, world_size=world_size)
        ).backward(batches([2, 2 + rank])),
        "a term that learns a tensor": lambda: DecoupledGradientAccumulation(
            model,
            ContrastiveLoss(rank=rank, world_size=world_size),
            terms=lambda outputs, *_: {"head": (outputs["image_features"] * plain).sum()},
        ).backward(batches([2, 2])),
        "a term that learns": lambda: DecoupledGradientAccumulation(
            model,
            ContrastiveLoss(rank=rank, world_size=world_size),
            terms=lambda outputs, *_: {"head": (outputs["image_features"] @ outside.own).sum()},
        ).backward(batches([2, 2])),
    }

    def other_terms(outputs, *_):
        total = outputs["image_features"].sum()
        return {"mine": total, "more": total} if rank == 0 else {f"of {rank}": total}

    def terms_of_one_rank(outputs, *_):
        return {"mine": outputs["image_features"].sum()} if rank == 0 else {}

    for terms in (other_terms, terms_of_one_rank):
        attempts[terms.__name__] = lambda terms=terms: DecoupledGradientAccumulation(
            DistributedDataParallel(bert_clip()),
            ContrastiveLoss(rank=rank, world_size=world_size),
            terms=terms,
        ).backward(batches([2, 2]))
    seen = {}
    for name, attempt in attempts.items():
        try:
            attempt()
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

    def gradients(dga: DecoupledGradientAccumulation) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)
        dga.backward(batches([2, 2, 2, 2], seed=rank))
        found = {name: p.grad for name, p in model.named_parameters()}
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        return found

    wanted = gradients(DecoupledGradientAccumulation(wrapped, loss))
    auto = DecoupledGradientAccumulation(wrapped, loss, retain="auto")
    with mock.patch("open_clip_zerovl.dga.retain.available_bytes", lambda device: 1e15):
        gradients(auto)
        kept = [auto.decision().graphs]
        model.register_forward_pre_hook(full)
        found = gradients(auto)
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


def start(world_size: int, names: list[str], folder: Any) -> list[dict[str, Any]]:
    run_ranks(world_size, __file__, str(folder), *names, timeout=600)
    return [
        torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=False)
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """(W, the result of each rank). Four ranks are slow: four processes on a core or two."""
    names = [*CASES, *CONTROLS]
    return request.param, start(request.param, names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_gradient_of_one_graph(ranks, name):
    world_size, found = ranks
    wanted = reference(CASES[name], world_size)
    for rank in range(world_size):
        for step in range(STEPS):
            assert error(found[rank][name][step], wanted[step]) <= EXACT, (
                f"rank {rank}, step {step}"
            )
            for parameter, gradient in found[rank][name][step].items():
                assert torch.equal(gradient, found[0][name][step][parameter]), (
                    f"ranks drift apart in {parameter}"
                )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options])
def test_one_rank_has_the_gradient_of_one_graph(name):
    found, wanted = run_case(CASES[name], 0, 1), reference(CASES[name], 1)
    for step in range(STEPS):
        assert error(found[step], wanted[step]) <= EXACT, f"step {step}"


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_come_out_wrong(ranks, name):
    world_size, found = ranks
    case, at_least = CONTROLS[name]
    assert error(found[0][name][0], reference(case, world_size)[0]) >= at_least


class DetachedGather(torch.nn.Module):
    """Dense reference in one graph: the mean over virtual ranks of local losses whose keys are constants.

    Args:
        world_size: virtual ranks, each with an equal part of the batch.
        keeps_own: the gather keeps the gradient of the rank's own keys, as A.1's equation reads. The released code does not.
    """

    def __init__(self, world_size: int, keeps_own: bool = False) -> None:
        super().__init__()
        self.world_size, self.keeps_own = world_size, keeps_own

    def forward(self, image_features, text_features, logit_scale, output_dict):
        images, texts = image_features.chunk(self.world_size), text_features.chunk(self.world_size)
        total = 0.0
        for r in range(self.world_size):
            seen = [
                torch.cat(
                    [x if o == r and self.keeps_own else x.detach() for o, x in enumerate(side)]
                )
                for side in (images, texts)
            ]
            labels = torch.arange(len(images[r])) + r * len(images[r])
            for query, keys in ((images[r], seen[1]), (texts[r], seen[0])):
                total = total + torch.nn.functional.cross_entropy(
                    logit_scale * query @ keys.T, labels
                )
        return {"contrastive_loss": total / (2 * self.world_size)}


def test_detached_gather_is_the_released_codes(ranks):
    """All gathered features are constants, the rank's own too; with the own ones kept the gradient is another."""
    world_size, found = ranks
    case = CONTROLS["detached gather"][0]
    wanted = reference(Case(case.loss, partial(DetachedGather, world_size)), world_size)
    for step in range(STEPS):
        assert error(found[0]["detached gather"][step], wanted[step]) <= EXACT
    keeps_own = reference(
        Case(case.loss, partial(DetachedGather, world_size, keeps_own=True)), world_size
    )
    assert error(found[0]["detached gather"][0], keeps_own[0]) >= 0.01


def test_what_cannot_be_right_over_ranks_is_refused(ranks):
    world_size, found = ranks
    for of_rank in found:
        seen = of_rank["refusals"]
        assert "gather_with_grad=True or use ContrastiveLoss" in seen["local_loss"]
        for name in ("world_size", "world_size in a partial"):
            assert (
                f"made for world_size=1, but the model's gradients are averaged over {world_size}"
                in seen[name]
            )
        assert f"made for world_size={world_size}" in seen["no DDP"]
        assert "static_graph" in seen["static_graph"]
        assert "at most 1 (over several ranks one must be replayed" in seen["retain"]
        assert "as many samples on each" in seen["ragged ClipLoss"]
        for term in ("a term that learns", "a term that learns a tensor"):
            assert "DistributedDataParallel does not average" in seen[term]
        for name in ("other_terms", "terms_of_one_rank"):
            assert "terms= must return the same names on every rank" in seen[name]


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


@pytest.mark.slow  # two processes trace two graphs each, forward and backward
def test_compiled_ddp(tmp_path):
    found = start(2, list(SLOW_CASES), tmp_path)
    for name, case in SLOW_CASES.items():
        wanted = reference(case, 2)
        for rank in range(2):
            for step in range(STEPS):
                assert error(found[rank][name][step], wanted[step]) <= EXACT


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run_cases(sys.argv[1], sys.argv[2:])
