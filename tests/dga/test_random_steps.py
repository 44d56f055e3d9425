"""Random models x losses x terms x K x R x sizes x freezing, each against one graph: the standing guard of exactness."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss, DistillClipLoss, SigLipLoss

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss, reversed_partner
from support.dga_reference import TOLERANCE, error, gradients, one_graph
from support.two_towers import MODELS, Metric, loss_for, noisy, tokens_and_experts

LOSSES = {
    "ours": ContrastiveLoss,
    "ours in chunks": lambda: ContrastiveLoss(chunk_size=3),
    "ours with mixup": lambda: ContrastiveLoss(chunk_size=2),
    "ClipLoss": ClipLoss,
    "one that drops features": lambda: noisy,
    "one that learns": Metric,
    "SigLIP": SigLipLoss,
}
DISTILLED = "distilled"  # a loss that needs a teacher
MODELS_WITH_SCALE = ("ViT and BERT", "open_clip.CLIP", "not open_clip's", "frozen visual")


TERMS = {"none": None, "three": tokens_and_experts}
FROZEN = (None, "visual", "text", "visual.proj", "text.proj", "logit_scale")


IN_FP32 = ("ViT and BERT", "open_clip.CLIP", "LoRA", "checkpointing")


def losses_in_fp32(loss):
    """A loss without weights in fp64."""
    return loss != "one that learns"


@st.composite
def cases(draw):
    model = draw(st.sampled_from(sorted(MODELS)))
    losses = (
        ["SigLIP", "ours", "ClipLoss"]
        if model == "with a bias"
        else sorted(LOSSES.keys() - {"SigLIP"})
    )
    if "two" in model or model in ("tied embeddings", "not open_clip's"):
        losses.remove("one that learns")  # its matrix has another width
    if model in MODELS_WITH_SCALE:
        losses.append(DISTILLED)
    smallest = 2 if "images" in model else 1  # batch norm takes no single sample
    sizes = draw(st.lists(st.integers(smallest, 4), min_size=1, max_size=5))
    loss = draw(st.sampled_from(losses))
    return {
        "model": model,
        "loss": loss,
        "terms": draw(st.sampled_from(sorted(TERMS))),
        "sizes": sizes,
        "retain": draw(st.integers(0, len(sizes))),
        "frozen": draw(st.sampled_from(FROZEN)),
        "dtype": torch.float32
        if model in IN_FP32 and losses_in_fp32(loss) and draw(st.booleans())
        else torch.float64,
        "training": draw(st.booleans()),
        "deferred": draw(st.booleans()),
        "steps": draw(st.integers(1, 2)),
        "scale": draw(st.sampled_from([1.0, 1.0, 2.0**10])),
        "seed": draw(st.integers(0, 2**16)),
    }


def worst_error(case):
    make, make_batches = MODELS[case["model"]]
    model = make().to(case["dtype"])
    extras = {"terms": TERMS[case["terms"]]}
    if case["loss"] == DISTILLED:
        extras["teacher"] = make().to(case["dtype"]).eval()
        with torch.no_grad():
            for parameter in extras["teacher"].parameters():
                parameter.mul_(1.1)
    loss = loss_for(model, (LOSSES | {DISTILLED: DistillClipLoss})[case["loss"]]())
    frozen = dict(model.named_modules()).get(case["frozen"]) or dict(model.named_parameters()).get(
        case["frozen"]
    )
    if frozen is not None:
        frozen.requires_grad_(False)
    model.train(case["training"])
    inputs = {}
    if case["loss"] == "ours with mixup":
        inputs = {"mixup_lambda": 0.7, "partner": reversed_partner(case["sizes"])}
    scaler = None if case["deferred"] else torch.amp.GradScaler("cpu", init_scale=case["scale"])
    step = DecoupledGradientAccumulation(
        model, loss, retain=case["retain"], check="always", scaler=scaler, **extras
    )
    worst = 0.0
    for number in range(case["steps"]):
        micro_batches = make_batches(case["sizes"])
        if case["dtype"] == torch.float32:
            micro_batches = [(images.float(), texts) for images, texts in micro_batches]
        own = list(loss.parameters()) if isinstance(loss, torch.nn.Module) else []
        for parameter in own:
            parameter.grad = None  # of the step before
        torch.manual_seed(case["seed"] + number)
        value, wanted = one_graph(model, loss, micro_batches, **extras, **inputs)
        wanted |= {f"loss {i}": p.grad for i, p in enumerate(own) if p.grad is not None}
        ended = torch.get_rng_state()
        for parameter in own:
            parameter.grad = None
        torch.manual_seed(case["seed"] + number)
        if case["deferred"]:
            total = step.loss(micro_batches, **inputs)
            (case["scale"] * total).backward()
        else:
            total = step.backward(micro_batches, **inputs)["loss"]
        torch.testing.assert_close(total.detach(), value)
        assert torch.equal(torch.get_rng_state(), ended), (
            "random numbers were not as if forwarded once"
        )
        found = gradients(model) | {
            f"loss {i}": p.grad for i, p in enumerate(own) if p.grad is not None
        }
        worst = max(
            worst, error({name: grad / case["scale"] for name, grad in found.items()}, wanted)
        )
    return worst


QUIET = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
}


@settings(max_examples=15, **QUIET)
@given(cases())
def test_random_steps_are_exact(case):
    assert worst_error(case) <= TOLERANCE[case["dtype"]]


@pytest.mark.slow  # some hundred steps; EXAMPLES=5000 for as many as one likes
@settings(max_examples=int(os.environ.get("EXAMPLES", "400")), **QUIET)
@given(cases())
def test_many_random_steps_are_exact(case):
    assert worst_error(case) <= TOLERANCE[case["dtype"]]
