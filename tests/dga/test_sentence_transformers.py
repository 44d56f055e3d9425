"""sentence-transformers' losses and trainer with decoupled gradient accumulation, against one graph (fp64, 1e-10)."""

import pytest
import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.sentence_transformers import DecoupledLoss
from support import documented
from support.dga_reference import TOLERANCE, error, gradients
from support.tiny_clip import WORDS, write_bert

library = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed"
)
losses = pytest.importorskip("sentence_transformers.losses")

EXACT = TOLERANCE[torch.float64]
SAMPLES, MINI = 7, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """BERT with dropout 0.1 and random weights, as sentence-transformers saves a model."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    torch.manual_seed(0)
    bert = write_bert(tmp_path_factory.mktemp("st") / "bert")
    AutoModel.from_config(AutoConfig.from_pretrained(bert)).save_pretrained(bert)
    AutoTokenizer.from_pretrained(bert).save_pretrained(bert)
    return bert


def tiny(folder, dtype=torch.float64):
    """The library puts mean pooling on a model that is not its own, so that BERT's pooler learns nothing."""
    model = library.SentenceTransformer(str(folder), device="cpu").to(dtype).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    return model


def columns(model, count, samples=SAMPLES):
    """Tokens of `count` columns: sentences of several lengths, so that each column is padded to another."""
    sentences = [
        [
            " ".join(WORDS[(i * 5 + c + j) % len(WORDS)] for j in range(2 + (i + c) % 5))
            for i in range(samples)
        ]
        for c in range(count)
    ]
    tokenize = getattr(model, "preprocess", None) or model.tokenize
    return [tokenize(column) for column in sentences]


class Scaled(losses.MultipleNegativesRankingLoss):
    """A loss that learns, too."""

    def __init__(self, model):
        super().__init__(model)
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def compute_loss_from_embeddings(self, embeddings, labels):
        anchors = embeddings[0] * self.log_scale.exp()
        return (
            super().compute_loss_from_embeddings([anchors, embeddings[1]], labels) * self.log_scale
        )


scores = torch.linspace(0, 1, SAMPLES, dtype=torch.float64)
KINDS = {
    "what it learns itself": (lambda model, _: Scaled(model), 2, None),
    "GTE's directions": (
        lambda model, _: losses.MultipleNegativesRankingLoss(
            model,
            directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
            partition_mode="joint",
        ),
        2,
        None,
    ),
    "scored pairs": (lambda model, _: losses.CoSENTLoss(model), 2, scores),
    "symmetric": (lambda model, _: losses.MultipleNegativesSymmetricRankingLoss(model), 2, None),
    "GIST with a guide": (lambda model, guide: losses.GISTEmbedLoss(model, guide), 2, None),
    "GIST, hard negatives": (lambda model, guide: losses.GISTEmbedLoss(model, guide), 3, None),
    "AnglE": (lambda model, _: losses.AnglELoss(model), 2, scores),
    "Matryoshka": (
        lambda model, guide: losses.MatryoshkaLoss(
            model, losses.GISTEmbedLoss(model, guide), [4, 8], n_dims_per_step=-1
        ),
        3,
        None,
    ),
    "labels": (lambda model, _: losses.OnlineContrastiveLoss(model), 2, (scores > 0.5).long()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_librarys_losses(folder, kind):
    """Without dropout: the plain loss on the whole batch is the reference."""
    make, count, labels = KINDS[kind]
    model, guide = tiny(folder).eval(), tiny(folder).eval()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.01 * torch.ones_like(parameter).cumsum(-1).sin())
    features, found = columns(model, count), []
    for loss in (make(model, guide), DecoupledLoss(make(model, guide), MINI, check="always")):
        value = loss([dict(column) for column in features], labels)
        value.backward()
        own = [p.grad for name, p in loss.named_parameters() if name.endswith("log_scale")]
        found.append((value.item(), gradients(model) | dict(enumerate(own))))
    (value, wanted), (ours, grads) = found
    assert abs(ours - value) < 1e-12 and error(grads, wanted) <= EXACT


REFUSED = {  # how the wrapped loss is made -> the sentence
    "RankingLoss has mini-batches of its own": lambda model, cached, _: DecoupledLoss(cached),
    "MatryoshkaLoss has mini-batches of its own": lambda model, cached, _: DecoupledLoss(
        losses.MatryoshkaLoss(model, cached, [4])
    ),
    "AdaptiveLayerLoss needs the outputs of the model's layers": lambda model, _, plain: DecoupledLoss(
        losses.AdaptiveLayerLoss(model, plain)
    ),
    "Linear has no model": lambda *_: DecoupledLoss(nn.Linear(2, 2)),
    "needs two columns at least, .* but got 1": lambda model, _, plain: DecoupledLoss(plain, 2)(
        columns(model, 1)
    ),
    "column 0's input_ids has 7, .* column 1's input_ids has 5": lambda model, _, plain: DecoupledLoss(
        plain, 2
    )([*columns(model, 1), *columns(model, 1, samples=5)]),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_used_gets_a_sentence(folder, sentence):
    model = tiny(folder)
    cached = losses.CachedMultipleNegativesRankingLoss(model)
    with pytest.raises(UserError, match=sentence):
        REFUSED[sentence](model, cached, losses.MultipleNegativesRankingLoss(model))


def test_the_documented_trainer_gives_the_weights_of_the_plain_loss(folder, tmp_path, monkeypatch):
    """Without dropout, in fp64: three steps of AdamW with clipping and two accumulated batches each, and an evaluation."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which the trainer needs")
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed, which the trainer needs"
    )
    monkeypatch.setenv("WANDB_DISABLED", "true")
    pairs = [
        (f"{WORDS[i % 18]} {WORDS[i % 7]}", f"{WORDS[(i + 3) % 18]} of {WORDS[i % 5]}")
        for i in range(48)
    ]
    dataset = datasets.Dataset.from_dict(
        {"anchor": [a for a, _ in pairs], "positive": [p for _, p in pairs]}
    )
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    wrapped = "DecoupledLoss(MultipleNegativesRankingLoss(model), mini_batch_size=32)"
    ways = {
        "plain": "MultipleNegativesRankingLoss(model)",
        "decoupled": wrapped.replace("32", "3"),
    }
    weights, evaluated = {"start": tiny(folder).state_dict()}, {}
    for way, loss in ways.items():
        model = tiny(folder)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        scope = {
            "model": model,
            "arguments": arguments,
            "dataset": dataset,
            "evaluation": dataset.select(range(10)),
        }
        code = documented("SentenceTransformerTrainer(")
        assert wrapped in code
        exec(compile(code.replace(wrapped, loss), "docs/dga.md", "exec"), scope)
        weights[way] = {name: value.clone() for name, value in model.state_dict().items()}
        state = scope["trainer"].state
        evaluated[way] = [row["eval_loss"] for row in state.log_history if "eval_loss" in row]
        assert state.global_step == 3

    def apart(one, other):
        return max((weights[one][name] - weights[other][name]).abs().max() for name in weights[one])

    assert apart("plain", "start") > 1e-5 and apart("plain", "decoupled") < 1e-9
    assert evaluated["plain"] == pytest.approx(evaluated["decoupled"], abs=1e-9)
