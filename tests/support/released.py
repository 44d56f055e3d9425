"""A tiny model in the layout of the paper's released checkpoints, whose own forward is the reference."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel, BertTokenizer

IMAGE_MODEL = "test_vit.r160_in1k"
TEMPERATURE = 0.0173


class Reference:
    """The released model's forward, from timm and transformers alone."""

    def __init__(
        self, bert_folder: Path, image_size_px: int = 160, embed_dim: int = 24, pooler: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.image_encoder = timm.create_model(
            IMAGE_MODEL, num_classes=0, img_size=image_size_px
        ).eval()
        self.text_encoder = BertModel(
            BertConfig.from_pretrained(bert_folder), add_pooling_layer=pooler
        ).eval()
        self.image_projection = torch.nn.Linear(self.image_encoder.embed_dim, embed_dim, bias=False)
        self.text_projection = torch.nn.Linear(32, embed_dim, bias=False)
        self.tokenizer = BertTokenizer.from_pretrained(bert_folder)
        with torch.no_grad():
            for tower in (self.image_encoder, self.text_encoder):
                for parameter in tower.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))

    def state_dict(self) -> dict[str, torch.Tensor]:
        weights = {
            f"image_encoder.model.model.{k}": v for k, v in self.image_encoder.state_dict().items()
        }
        weights |= {
            f"text_encoder.model.model.{k}": v for k, v in self.text_encoder.state_dict().items()
        }
        weights["image_projection.linear.weight"] = self.image_projection.weight.data
        weights["text_projection.linear.weight"] = self.text_projection.weight.data
        weights["loss.temperature"] = torch.tensor(TEMPERATURE)
        return weights

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokenizer(
            texts, padding="max_length", max_length=25, truncation=True, return_tensors="pt"
        )
        hidden = self.text_encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask
        ).last_hidden_state
        image = F.normalize(self.image_projection(self.image_encoder(images)), dim=-1)
        return image, F.normalize(self.text_projection(hidden[:, 0]), dim=-1)


def saved(file: Path, weights: dict[str, torch.Tensor], **more: object) -> Path:
    torch.save({"state_dict": weights, **more}, file)
    return file
