"""Per-sample terms, teachers and further features of a step against one graph (fp64); random steps have them, too."""

import pytest
import torch
from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss
from torch import nn
from torch.nn.functional import normalize

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga import CaptionTerm, DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss
from support import documented
from support.dga_reference import (
    SEED,
    accumulated,
    batches,
    bert_clip,
    gradients,
    one_graph,
    reference,
    sharp_error,
)
from support.tiny_coca import PAD, padded_batches, tiny_coca

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


def test_a_batch_without_tokens_and_a_micro_batch_without_tokens():
    model, micro_batches, term = tiny_coca(), padded_batches([3, 2, 2]), CaptionTerm(1.0)
    micro_batches[1][1][:, 1:] = PAD
    _, wanted = reference(model, ClipLoss(), micro_batches, terms=term)
    _, found = accumulated(model, ClipLoss(), micro_batches, terms=term)
    assert sharp_error(found, wanted) <= EXACT
    for _, texts in micro_batches:
        texts[:, 1:] = PAD
    losses, found = accumulated(model, ClipLoss(), micro_batches, terms=term)
    assert losses["caption_loss"] == 0 and all(g.isfinite().all() for g in found.values())


def test_a_term_gets_the_prepared_inputs_and_the_further_parts():
    model, sizes = bert_clip(), [3, 2]
    micro_batches = [
        (*pair, torch.arange(len(pair[0]), dtype=torch.float64)) for pair in batches(sizes)
    ]

    def prepare(images, texts, weights):
        return images * 2, texts

    def weighed(outputs, images, texts, weights):
        brightness = images.mean((1, 2, 3)) * weights
        return {"weighed": ((outputs["text_features"][:, 0] * brightness).sum(), weights.sum())}

    _, wanted = reference(model, ClipLoss(), micro_batches, prepare=prepare, terms=weighed)
    _, found = accumulated(model, ClipLoss(), micro_batches, prepare=prepare, terms=weighed)
    assert sharp_error(found, wanted) <= EXACT


def test_the_teacher_of_each_micro_batch():
    model, teacher = bert_clip(), bert_clip(seed=3).eval()
    micro_batches, calls = batches(SIZES), []
    counted = lambda *inputs: calls.append(1) or teacher(*inputs)  # noqa: E731
    losses, _ = accumulated(model, DistillClipLoss(), micro_batches, teacher=counted, retain=0)
    assert len(calls) == 3  # once each, not in the replay
    assert losses.keys() == {"contrastive_loss", "distill_loss", "loss", "logit_scale"}
    assert all(parameter.grad is None for parameter in teacher.parameters())
    model.eval()
    _, wanted = reference(model, DistillClipLoss(), micro_batches, teacher=teacher)
    given, order = in_another_order(micro_batches), {"text_order": ORDER}
    _, found = accumulated(model, DistillClipLoss(), given, teacher=teacher, loss_inputs=order)
    assert sharp_error(found, wanted) <= EXACT


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


SIZES = [3, 2, 2]
ORDER = torch.tensor([3, 0, 6, 1, 2, 5, 4])


def in_another_order(micro_batches):
    """The same pairs with their texts in `ORDER`."""
    texts = torch.cat([texts for _, texts in micro_batches])[ORDER].split(SIZES)
    return [(images, text) for (images, _), text in zip(micro_batches, texts, strict=True)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_documented_late_interaction_is_exact(shuffled):
    """With further features of images and of texts."""
    model, micro_batches = PagesAndQueries().train(not shuffled), batches(SIZES)
    scope = {
        "DecoupledGradientAccumulation": DecoupledGradientAccumulation, "nn": nn, "torch": torch,
        "pages_and_queries": model,
    }  # fmt: skip
    exec(compile(documented("def late_interaction"), "docs/dga.md", "exec"), scope)
    more = {"patches": "images", "tokens": "texts"}

    def loss(**values):
        return {"contrastive_loss": scope["late_interaction"](**values)}

    _, wanted = reference(model, loss, micro_batches, more=more)
    inputs = {"text_order": ORDER} if shuffled else {}
    given = in_another_order(micro_batches) if shuffled else micro_batches
    _, found = accumulated(model, loss, given, features=more, check="always", loss_inputs=inputs)
    assert sharp_error(found, wanted) <= EXACT


def test_the_documented_losses_and_terms_run_exactly():
    """docs/dga.md's examples: labels, Matryoshka; a head, a balance loss and captions as terms."""
    labels = torch.tensor([0, 1, 0, 2, 1, 1, 3])
    model, heads, coca = bert_clip().eval(), Heads().eval(), tiny_coca().eval()
    pairs, texts = batches(SIZES), padded_batches(SIZES)
    labelled = [(*pair, part) for pair, part in zip(pairs, labels.split(SIZES), strict=True)]
    scope = {
        "DecoupledGradientAccumulation": DecoupledGradientAccumulation, "ContrastiveLoss": ContrastiveLoss, "nn": nn,
        "model": model, "micro_batches": pairs, "labels": labels,
        "model_with_heads": heads, "coca": coca, "labelled_micro_batches": labelled,
    }  # fmt: skip
    of_features = documented("Matryoshka(").replace("64, 128, 512", "4, 8, 16")
    exec(compile(of_features, "docs/dga.md", "exec"), scope)
    scope["micro_batches"] = texts
    exec(compile(documented("CaptionTerm("), "docs/dga.md", "exec"), scope)
    found = [gradients(each) for each in (model, heads, coca)]
    small = scope["Matryoshka"](ContrastiveLoss(), (4, 8, 16))

    def both(labels, **values):
        return {
            "labels": scope["supervised_contrastive"](labels=labels, **values),
            **small(**values),
        }

    wanted = [
        one_graph(model, both, pairs, labels=labels),
        one_graph(heads, ClipLoss(), labelled, terms=scope["terms"]),
        one_graph(coca, ClipLoss(), texts, terms=CaptionTerm(2.0)),
    ]
    for one, (_, other) in zip(found, wanted, strict=True):
        assert sharp_error(one, other) <= EXACT


def test_a_term_that_the_replay_does_not_repeat_is_found():
    calls = []

    def drifting(outputs, *_):
        calls.append(1)
        return {"drift": (outputs["image_features"].sum() + len(calls), 1)}

    with pytest.raises(ReplayError, match="Replayed sum of drift of micro-batch 0 differ"):
        accumulated(bert_clip(), ClipLoss(), batches([3, 2]), terms=drifting)


def test_terms_that_cannot_be_exact_are_refused():
    model, micro_batches = bert_clip(), batches([3, 2])
    for terms, message in [
        (lambda o, *_: {"a": o["image_features"]}, r"term a must be .* of shape \(3, 16\)"),
        (lambda o, *_: {"a": 1.0}, "term a must be a tensor of one number, .* but is a float"),
        (
            lambda o, *_: {"a": (o["image_features"].sum(), o["text_features"].sum())},
            "count of the term a .* with gradient",
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
    with pytest.raises(UserError, match="features= must name .* 'view': 'rows'"):
        accumulated(model, ClipLoss(), micro_batches, features={"view": "rows"})

    class Other(CoCaLoss):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

    with pytest.raises(UserError, match=r"Other changes CoCaLoss\.forward"):
        DecoupledGradientAccumulation(tiny_coca(), Other(1.0, 1.0))
