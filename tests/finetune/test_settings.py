"""Settings of a fine-tuning: chosen by data and machine, replaced by flags, and accepted by training."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.finetune.proposal import (
    AS_ASKED,
    Facts,
    as_flags,
    choose_settings,
)
from open_clip_zerovl.recipe.flags import as_arguments, parse_settings, settings_of
from training.params import parse


def facts(samples: int, **more) -> Facts:
    usual = {"sources": {"mine": samples}, "masks": False, "gpus": 0, "bf16": False, "cores": 2}
    return Facts(samples, **{**usual, **more})


def chosen(facts: Facts, **given) -> dict[str, str | None]:
    asked = {flag.replace("_", "-"): value for flag, value in given.items()}
    return {each.flag: each.value for each in choose_settings(facts, asked)}


@pytest.mark.parametrize(
    ("samples", "batch", "epochs"),
    [
        (1_000, 64, 20), (10_000, 1024, 20), (100_000, 2048, 20), (300_000, 2048, 10), (1_000_000, 2048, 10),
        (5_000_000, 2048, 5), (48, 16, 20), (31, 8, 20), (16, 8, 20),
    ],
)  # fmt: skip
def test_batch_and_length_follow_from_the_data(samples, batch, epochs):
    values = chosen(facts(samples))
    assert values["effective-batch"] == str(batch)
    assert samples // batch >= (8 if batch > 16 else 2)
    assert (
        values["epochs"] == str(epochs) and values["lr"] == "1e-05" and values["lr-min"] == "1e-06"
    )
    steps = epochs * (samples // batch)
    assert 0.025 <= float(values["warmup-share"]) <= 0.2
    assert float(values["warmup-share"]) * steps >= min(50, 0.2 * steps) - 1


@pytest.mark.parametrize(
    ("gpus", "split"),
    [(0, ("16", "64")), (1, ("256", "4")), (8, ("128", "1")), (3, ("256", "1"))],
)
def test_the_batch_is_split_over_micro_batches_and_ranks(gpus, split):
    values = chosen(facts(10_000, gpus=gpus, cores=32))
    assert (values["batch-size"], values["dga-steps"]) == split
    assert chosen(facts(10_000, gpus=gpus), batch_size="32")["batch-size"] == "32"


TWO = {"a": 5_000, "b": 3_000}


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ({"sources": TWO}, "sampling", "debiased"),
        ({"sources": {"a": 7_900, "b": 100}}, "sampling", "random"),
        ({"sources": TWO, "old_share": 0.2}, "sampling", "random"),
        ({}, "text-augment", None),
        ({"masks": True}, "text-augment", "0.2"),
        ({"gpus": 0}, "precision", "fp32"),
        ({"gpus": 1, "bf16": True}, "precision", "amp_bf16"),
        ({"gpus": 1, "bf16": False}, "precision", "amp"),
        ({"sigmoid": True}, "siglip", ""),
        ({"sigmoid": False}, "siglip", None),
        ({"samples": 1_000_000}, "save-every-steps", "250"),
        ({"samples": 1_000}, "save-every-steps", None),
    ],
)
def test_sources_tokenizer_and_machine_decide(given, flag, value):
    assert chosen(facts(**{"samples": 8_000, **given}))[flag] == value


def test_what_is_asked_replaces_the_choice_and_says_so():
    given = parse_settings(
        ["lr=5e-6", "freeze=text", "text-augment=", "grad-checkpointing"]
    ) | settings_of(["--wd=0.2"])
    settings = {each.flag: each for each in choose_settings(facts(8_000, masks=True), given)}
    expected = {
        "lr": "5e-6",
        "freeze": "text",
        "text-augment": None,
        "grad-checkpointing": "",
        "wd": "0.2",
    }
    for flag, value in expected.items():
        assert settings[flag].value == value and settings[flag].reason == AS_ASKED
    assert settings["lr-min"].value == "5e-07"


@pytest.mark.parametrize(("samples", "gpus"), [(1_000, 0), (300_000, 2)])
def test_training_takes_the_flags(samples, gpus):
    settings = choose_settings(facts(samples, gpus=gpus, masks=True, cores=16), {})
    words = as_arguments({"model": "ViT-B-32", "train-data": "mine=/data", **as_flags(settings)})
    args, config = parse(words)
    assert args.lr == 1e-5 and config.captions == "one-per-epoch" and config.dga_retain == "auto"
    assert config.freeze_norm_statistics


@pytest.mark.parametrize(
    ("samples", "given", "sentence"),
    [
        (
            100,
            {"effective-batch": "128"},
            r"batch of 128 is larger than the 100 samples .*effective-batch=8 or less",
        ),
        (
            100,
            {"batch-size": "64", "dga-steps": "2"},
            "batch of 128 is larger than the 100 samples",
        ),
        (5, {}, "fine-tuning needs at least 16 samples, and the data has 5"),
        (100, {"epochs": "many"}, "--set epochs=many must be a whole number"),
        (100, {"lr": "fast"}, "--set lr=fast must be a number above 0"),
        (100, {"epochs": None}, "--set epochs= removes a setting that fine-tuning needs"),
        (
            100,
            {"model": "RN50"},
            "--set model does not work with finetune, which decides it; give --from MODEL",
        ),
        (
            100,
            {"zero-shot-data": "x=/d"},
            "--set zero-shot-data does not work with finetune, .* give --zero-shot-data",
        ),
    ],
)
def test_refusals(samples, given, sentence):
    with pytest.raises(UserError, match=sentence):
        choose_settings(facts(samples), given)


def test_adapters_have_a_rate_of_their_own():
    """Projections keep the rate of full fine-tuning."""
    given = parse_settings(["lora=16", "lora-on=image", "layer-decay=0.8", "wd=0.2"])
    values = chosen(
        facts(10_000), **{flag.replace("-", "_"): value for flag, value in given.items()}
    )
    assert values["lr"] == "0.0001" and values["lr-head"] == "1e-05" and values["lora"] == "16"
    assert "lr-head" not in chosen(
        facts(10_000), lora="16", opt="timm/lamb"
    )  # training has one rate for it
    assert chosen(facts(10_000), lora="16", lr_head="2e-5")[
        "lr-head"
    ] == "2e-5" and "lr-head" not in chosen(facts(10_000))
