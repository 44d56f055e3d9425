"""Per-sample terms, teachers and further features of a step against one graph (fp64); random steps have them, too."""

import sys
from types import SimpleNamespace

import pytest
import torch
from open_clip.loss import ClipLoss, CoCaLoss
from torch import nn
from torch.nn.functional import normalize

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga import CaptionTerm, DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from support import documented
from support.dga_reference import (
    SEED,
    accumulated,
    batches,
    bert_clip,
    gradients,
    one_graph,
    sharp_error,
)
from support.tiny_coca import padded_batches, tiny_coca

EXACT = 1e-12


def whole_coca_loss(model, loss, micro_batches):
    """open_clip's own CoCaLoss on the outputs of all micro-batches in one graph."""
    outputs = [model(*micro_batch) for micro_batch in micro_batches]
    joined = {
        name: torch.cat([output[name] for output in outputs])
        for name in ("image_features", "text_features", "logits", "labels")
        if name in outputs[0]
    }
    if "labels" not in joined:  # open_clip 4 shifts them in its task
        joined["logits"] = joined["logits"][:, :-1]
        joined["labels"] = torch.cat([texts[:, 1:] for _, texts in micro_batches])
    return loss(**joined, logit_scale=outputs[-1]["logit_scale"], output_dict=True)


def test_open_clips_coca_loss_is_split_into_its_parts():
    model, loss = tiny_coca(), CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=0.7)
    micro_batches = padded_batches([3, 2, 4, 1])
    torch.manual_seed(SEED)
    wanted = whole_coca_loss(model, loss, micro_batches)
    sum(wanted.values()).backward()
    reference_gradients = gradients(model)
    losses, found = accumulated(model, loss, micro_batches, check="always")
    assert list(losses) == ["contrastive_loss", "caption_loss", "loss", "logit_scale"]
    for name, value in (*wanted.items(), ("loss", sum(wanted.values()))):
        assert losses[name].item() == pytest.approx(value.item(), rel=1e-12)
    assert sharp_error(found, reference_gradients) <= EXACT
    losses, found = accumulated(model, loss, padded_batches([3]))  # without a token
    assert losses["caption_loss"] == 0 and all(g.isfinite().all() for g in found.values())


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.clip, self.head = bert_clip(), nn.Linear(16, 5).double()

    def forward(self, images, texts):
        outputs = self.clip(images, texts)
        return outputs | {
            "class_logits": self.head(outputs["image_features"]),
            "balance_loss": outputs["text_features"].mean(0).square().sum(),
        }


class PagesAndQueries(nn.Module):
    """Four patches a page and three tokens a query, as late interaction compares them."""

    def __init__(self):
        super().__init__()
        self.clip = bert_clip()

    def forward(self, images, texts):
        outputs = self.clip(images, texts)
        for name, kind, count in (("patches", "image", 4), ("tokens", "text", 3)):
            shifts = torch.arange(count, dtype=torch.float64)[:, None]
            outputs[name] = normalize(
                (outputs[f"{kind}_features"][:, None] * 3 + shifts).sin(), dim=2
            )
        return outputs


def test_the_documented_losses_and_terms_run_exactly():
    """docs/dga.md's examples: labels, Matryoshka; late interaction; a head, a balance loss and captions as terms."""
    sizes, labels = [3, 2, 2], torch.tensor([0, 1, 0, 2, 1, 1, 3])
    models = bert_clip(), PagesAndQueries(), Heads(), tiny_coca()
    model, late, heads, coca = (each.eval() for each in models)
    pairs, texts = batches(sizes), padded_batches(sizes)
    labelled = [(*pair, part) for pair, part in zip(pairs, labels.split(sizes), strict=True)]
    scope = {
        "DecoupledGradientAccumulation": DecoupledGradientAccumulation, "ContrastiveLoss": ContrastiveLoss,
        "nn": nn, "torch": torch, "model": model, "micro_batches": pairs, "labels": labels,
        "pages_and_queries": late, "model_with_heads": heads, "coca": coca, "labelled_micro_batches": labelled,
    }  # fmt: skip
    of_features = documented("Matryoshka(").replace("64, 128, 512", "4, 8, 16")
    exec(compile(of_features, "docs/dga.md", "exec"), scope)
    exec(compile(documented("def late_interaction"), "docs/dga.md", "exec"), scope)
    scope["dga"].backward(pairs)
    scope["micro_batches"] = texts
    exec(compile(documented("CaptionTerm("), "docs/dga.md", "exec"), scope)
    found = [gradients(each) for each in models]
    small = scope["Matryoshka"](ContrastiveLoss(), (4, 8, 16))

    def both(labels, **values):
        return {
            "labels": scope["supervised_contrastive"](labels=labels, **values),
            **small(**values),
        }

    def interaction(**values):
        return {"contrastive_loss": scope["late_interaction"](**values)}

    wanted = [
        one_graph(model, both, pairs, labels=labels),
        one_graph(late, interaction, pairs, more=("patches", "tokens")),
        one_graph(heads, ClipLoss(), labelled, terms=scope["terms"]),
        one_graph(coca, ClipLoss(), texts, terms=CaptionTerm(2.0)),
    ]
    for one, (_, other) in zip(found, wanted, strict=True):
        assert sharp_error(one, other) <= EXACT


def test_the_documented_adapter_of_a_loss_with_its_own_gradients(monkeypatch):
    """By a stand-in with memeff's signature; tests/gpu has the real one."""

    def stand_in(*, temperature, stable):
        return lambda *sides: ClipLoss()(*sides, torch.tensor(1 / temperature))

    def exact(image_features, text_features, **_):
        return {"contrastive_loss": ClipLoss()(image_features, text_features, torch.tensor(50.0))}

    monkeypatch.setitem(sys.modules, "memeff", SimpleNamespace(MemoryEfficientCLIPLoss=stand_in))
    scope, model, pairs = {"world_size": 1}, bert_clip().eval(), batches([3, 2])
    exec(documented("memeff"), scope)
    model.logit_scale.requires_grad_(False)
    wanted = one_graph(model, exact, pairs)[1]
    assert sharp_error(accumulated(model, scope["memory_efficient"], pairs)[1], wanted) <= EXACT


def test_terms_that_cannot_be_exact_are_refused():
    model, micro_batches = bert_clip(), batches([3, 2])
    for terms, message in [
        (
            lambda o, *_: {"a": (o["image_features"].sum(), o["text_features"].sum())},
            "count of the term a is trained",
        ),
        (
            lambda o, images, *_: {"a": o["image_features"].sum()} if len(images) == 3 else {},
            "term a is missing in some micro-batches",
        ),
        (
            lambda o, images, *_: {
                "a": (o["image_features"].sum(), 3)
                if len(images) == 3
                else o["image_features"].sum()
            },
            "term a has a count in some micro-batches only",
        ),
        (
            lambda o, *_: {"contrastive_loss": o["image_features"].sum()},
            "give the term another name",
        ),
        (lambda o, *_: {"logit_scale": o["image_features"].sum()}, "logit_scale is a term and"),
    ]:
        with pytest.raises(UserError, match=message):
            accumulated(model, ClipLoss(), micro_batches, terms=terms)
    with pytest.raises(UserError, match="text_order does not work with terms"):
        accumulated(
            tiny_coca(), ClipLoss(), micro_batches, terms=CaptionTerm(),
            loss_inputs={"text_order": torch.arange(5)},
        )  # fmt: skip

    class Other(CoCaLoss):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

    with pytest.raises(UserError, match=r"Other changes CoCaLoss\.forward"):
        DecoupledGradientAccumulation(tiny_coca(), Other(1.0, 1.0))
