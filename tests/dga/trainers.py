"""A training by the documented example of another library, against one graph on the whole batch; run by test_trainers.py.

Usage, alone or under torchrun: trainers.py EXAMPLE. A step takes all SAMPLES pairs, in an order that the library draws: the
gradient of a contrastive loss does not depend on it. The models have no dropout, whose masks depend on the rank.
"""

import copy
import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from support import documented
from support.dga_reference import CONTEXT, VOCABULARY

SAMPLES, STEPS, MICRO_BATCH, RATE = 12, 3, "5", 0.05
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def defined(page: str, *needles: str) -> dict:
    """The names that Python blocks of a page define, with micro-batches of 5 instead of 32."""
    scope = {
        "ContrastiveLoss": ContrastiveLoss,
        "DecoupledGradientAccumulation": DecoupledGradientAccumulation,
    }
    for needle in needles:
        code = documented(needle, page).replace("32", MICRO_BATCH)
        exec(compile(code, page, "exec"), scope)
    return scope


class Towers(nn.Module):
    """Two linear towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        sides = {"image_features": self.image(images), "text_features": self.text(texts)}
        normal = {
            name: nn.functional.normalize(features, dim=1) for name, features in sides.items()
        }
        return {**normal, "logit_scale": self.scale.exp()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def pairs() -> list:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(width, generator=generator).double() for width in (6, 5))
        for _ in range(SAMPLES)
    ]


def own_loop(train, epochs: int):
    """`train(model, loader)` trains the model that it was given; the loader has as many steps as the epochs leave."""
    model = Towers().double()
    rows = pairs()
    wanted = whole(
        model, ContrastiveLoss(), lambda towers: towers(*map(torch.stack, zip(*rows, strict=True)))
    )
    train(model, DataLoader(rows * (STEPS // epochs), batch_size=SAMPLES // ranks()))
    return model, wanted


def accelerate():
    def train(model, loader):
        defined("api.md", "def train(model, optimizer, loader)")["train"](model, sgd(model), loader)

    os.environ["ACCELERATE_USE_CPU"] = (
        "true"  # as `accelerate launch --cpu` does; torchrun alone makes one process of each
    )
    return own_loop(train, epochs=1)


def lightning():
    import lightning

    def train(model, loader):
        scope = defined("api.md", "class TowersDDP")
        chosen = scope["TowersDDP"](process_group_backend="gloo") if ranks() > 1 else "auto"
        options = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "devices": ranks(),
        }
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=STEPS, strategy=chosen, **options)
        trainer.fit(scope["LargeBatchModule"](model, sgd(model)), loader)

    return own_loop(train, epochs=STEPS)


def hugging_face(model, rows, loss):
    """The documented trainer: one step in an epoch."""
    from transformers import TrainingArguments, default_data_collator

    scope = defined("dga.md", "class HuggingFaceTowers", "class LargeBatchTrainer")
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    sides = [
        {k: v for k, v in batch.items() if (k == "input_ids") == text} for text in (False, True)
    ]

    wanted = whole(model, loss(), lambda inner: scope["HuggingFaceTowers"](inner)(*sides))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=SAMPLES // ranks(),
            per_device_eval_batch_size=SAMPLES // ranks(),
            num_train_epochs=STEPS,
            lr_scheduler_type="constant",
            learning_rate=RATE,
            max_grad_norm=0,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        kind = type("Chosen", (scope["LargeBatchTrainer"],), {"large_loss": loss})
        trainer = kind(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=lambda rows: {**default_data_collator(rows), "return_loss": True},
            optimizers=(sgd(model), None),
        )
        trainer.train()
        value = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            dense = loss()(**scope["HuggingFaceTowers"](model.eval())(*sides))
        assert abs(value - dense.item()) <= 1e-6, (value, dense)  # the trainer gathers in fp32
    return model, wanted


def texts(generator) -> dict:
    return {"input_ids": torch.randint(3, VOCABULARY, (CONTEXT,), generator=generator)}


def clip():
    from transformers import CLIPConfig, CLIPModel

    text = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).double()
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"pixel_values": torch.randn(3, 32, 32, generator=generator).double(), **texts(generator)}
        for _ in pairs()
    ]
    return hugging_face(model, rows, ContrastiveLoss)


def siglip2():
    """Pictures of 2 x 3 and 3 x 2 patches, padded to 8."""
    from transformers import Siglip2Config, Siglip2Model

    text = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "projection_size": 16,
    }
    model = Siglip2Model(
        Siglip2Config(text_config=text, vision_config={**SIZES, "num_patches": 9, "patch_size": 4})
    )
    model = model.double()
    with torch.no_grad():
        model.logit_scale.fill_(1.0), model.logit_bias.fill_(-2.0)
    generator, rows = torch.Generator().manual_seed(1), []
    for i in range(SAMPLES):
        images = {
            "pixel_values": torch.randn(8, 48, generator=generator).double(),
            "pixel_attention_mask": (torch.arange(8) < 6).long(),
            "spatial_shapes": torch.tensor([[2, 3], [3, 2]][i % 2]),
        }
        rows.append({**images, **texts(generator)})
    return hugging_face(model, rows, SigmoidLoss)


def whole(model, loss, forward) -> dict:
    """The weights after STEPS steps with one graph on all pairs; the model stays as it is."""
    model = copy.deepcopy(model).train()
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(**forward(model)).backward()
        optimizer.step()
    return model.state_dict()


def main() -> None:
    torch.manual_seed(0)
    example = {"accelerate": accelerate, "lightning": lightning, "clip": clip, "siglip2": siglip2}
    model, wanted = example[sys.argv[1]]()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Siglip2Model interpolates its position embedding in fp32, also in an fp64 model.
        bound = (
            1e-8 if name.endswith("vision_model.embeddings.position_embedding.weight") else 1e-10
        )
        worst = (found[name] - value).abs().max().item()
        assert worst < bound, f"{name} differs by {worst}"


if __name__ == "__main__":
    main()
