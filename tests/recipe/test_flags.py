"""Flags: each declared once in `recipe.flags`; training's parser and checks follow from it."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.core.releases import OPENCLIP_V4, line_here
from open_clip_zerovl.recipe.flags import (
    AllFlags,
    OpenClipFlags,
    RecipeConfig,
    as_arguments,
    parse_settings,
    settings_of,
)
from training.params import build_parser, open_clip_parser, parse

DATA = ["--train-data", "a=/x"]


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        action.option_strings[-1]: action for action in parser._actions if action.option_strings
    }


def options() -> set[str]:
    return {each.option for each in flags_of(AllFlags)} | {
        each.switch[0] for each in flags_of(AllFlags) if each.switch is not None
    }


def test_every_flag_of_ours_is_parsed_with_its_default():
    training = actions(build_parser())
    assert set(training) == options() - {each.option for each in flags_of(OpenClipFlags)}
    for each in flags_of(RecipeConfig):
        found = training[each.option].default
        assert (tuple(found) if isinstance(found, list) else found) == each.default, each.option


# Differences of open_clip 4 from 3.3: removed flags, and more choices.
GONE = ("--torchscript", "--trace", "--horovod") if line_here() is OPENCLIP_V4 else ()
MORE = (
    {"--dataset-type": ("webdataset-audio", "synthetic-audio")}
    if line_here() is OPENCLIP_V4
    else {}
)


def test_open_clips_flags_are_as_open_clip_has_them():
    stock = actions(open_clip_parser())
    assert not set(GONE) & set(stock)
    for each in flags_of(OpenClipFlags):
        if each.option in GONE:
            continue
        action = stock[each.option]
        assert action.default == each.default, each.option
        assert (action.nargs == 0) == (each.kind is bool), each.option
        if each.kind is bool or each.name == "aug_cfg":  # which has an action of its own there
            continue
        assert (action.type or str) is each.kind and action.nargs == each.nargs, each.option
        if action.choices is not None:
            choices = [
                choice for choice in action.choices if choice not in MORE.get(each.option, ())
            ]
            assert tuple(choices) == each.choices, each.option


def test_a_file_stands_for_its_words(tmp_path):
    """At its place of the command line, where the last of two values counts."""
    lines = "--lr 1e-4 --debiased-sampling\n# ours\n--aug-cfg 'scale=(0.6, 1.0)'  # a crop\n--epochs 3\n"
    (tmp_path / "run.txt").write_text(lines)
    words = ["--debiased-sampling", "--aug-cfg", "scale=(0.6, 1.0)", "--epochs", "3", *DATA]
    found = parse(["--epochs", "9", f"@{tmp_path}/run.txt", "--lr", "2e-4", *DATA])
    assert found == parse(["--lr", "2e-4", *words]) != parse(["--epochs", "9", *words[:3], *DATA])


def test_no_flag_given_means_open_clips_own_run():
    args, config = parse([])
    assert (
        not config.changes(*(each.name for each in flags_of(RecipeConfig)))
        and not config.active
        and not hasattr(args, "dga_steps")
    )
    assert parse(["--dga-steps", "2"])[0].dga_steps == 2


# A line of flags | how the sentence about it begins; `--train-data a=/x` comes before the flags.
REFUSED = """
--dga-steps 0 | --dga-steps 0 is out of range; give
--loss-chunk 0 | --loss-chunk 0 is out of range; give
--batch-size 0 | --batch-size 0 is out of range; give
--epochs 0 | --epochs 0 is out of range; give
--workers -1 | --workers -1 is out of range; give
--train-num-samples 0 | --train-num-samples 0 is out of range; give
--text-augment 1.5 | --text-augment 1.5 is out of range; give
--token-drop 1.0 | --token-drop 1.0 is out of range; give
--save-every-steps 0 | --save-every-steps 0 is out of range; give
--dga-retain 5 --dga-steps 4 | --dga-retain 5 is out of range; give
--mixup-alpha -0.5 --coin-flip-mixup | --mixup-alpha -0.5 is out of range; give
--keep-checkpoints 0 --save-every-steps 5 | --keep-checkpoints 0 is out of range; give
--model coca_ViT-B-32 --distill-model x --distill-pretrained y --dga-steps 2 | --distill-model does not work with --model coca
--lr-image 0 | --lr-image 0.0 is out of range; give a positive number
--layer-decay 1.5 | --layer-decay 1.5 is out of range
--lr-text 1e-4 --lr 0 | --lr-text needs --lr above 0
--lr-head 1e-4 --opt timm/lamb --eps 1e-6 --lr 1e-3 | --opt timm/lamb does not work with --lr-head
--lora 0 | --lora 0 is out of range; give at least 1
--lora-on text | --lora-on needs --lora
--lora 4 --lock-image | --lock-image and --lock-text do not work with --lora: the weights of both towers
--lora 4 --freeze text | --freeze of a tower with adapters does not work with --lora: give --lora-on the other
--token-dorp 0.5 | there is no flag --token-dorp; did you mean --token-drop?
--dga-step 4 | there is no flag --dga-step; did you mean --dga-steps?
--warm-up=5 | there is no flag --warm-up; did you mean --warmup?
--qqqqq | there is no flag --qqqqq; `python -m training.main --help` lists the flags
word | unrecognized arguments: word;
--dga-steps many | argument --dga-steps: invalid int value: 'many'; `python
--dga-retain some | argument --dga-retain: invalid auto-or-number value: 'some'; `python
--aug-cfg scale | --aug-cfg or --opt-kwargs is not understood
--aug-cfg scale=(0.6, | --aug-cfg or --opt-kwargs is not understood
--token-drop 0.5 --force-patch-dropout 0.5 | --force-patch-dropout 0.5 does not work with --token-drop: they are
--skip-scheduler --lr-min 1e-6 | --skip-scheduler does not work with --lr-min
--skip-scheduler --warmup-share 0.1 | --skip-scheduler does not work with --warmup-share
--warmup 50 --warmup-share 0.1 | --warmup 50 does not work with --warmup-share
--positives both --coin-flip-mixup | --coin-flip-mixup does not work with --positives: a mixed sample
--positives both --ablate detached-gather | --ablate detached-gather does not work with --positives
--ablate no-replay | --dga-retain 1 with --dga-steps 1 does not work with --ablate no-replay: no micro-batch
--ablate no-replay --dga-steps 2 --dga-retain 2 | --dga-retain 2 with --dga-steps 2 does not work with
--ablate detached-gather --distill-model x --distill-pretrained y | --distill-model does not work with
--sort-text --model coca_ViT-B-32 | --model coca_ViT-B-32 does not work with --sort-text
--train-data /x.csv --positives caption | --positives needs named sources: --train-data NAME=SHARDS
--train-data= --debiased-sampling | --sampling debiased needs --train-data NAME=SHARDS::...
--train-data= --sampling sequential | --sampling sequential needs --train-data NAME=SHARDS::...
--freeze-norm-statistics --use-bn-sync | --use-bn-sync does not work with --freeze-norm-statistics: it replaces
--keep-checkpoints 5 | --keep-checkpoints needs --save-every-steps
--dga-check always | --dga-check needs --dga-steps of 2 or more
--retrieval-frequency 2 | --retrieval-frequency needs --retrieval-data or --zero-shot-data
--retrieval-captions all | --retrieval-captions needs --retrieval-data
--retrieval-transform paper | --retrieval-transform needs --retrieval-data
--freeze image --freeze text | --freeze image does not work with --freeze text: nothing but
--freeze image --lock-image | --lock-image does not work with --freeze image: give one
--mixup-alpha 0.3 | --mixup-alpha needs --coin-flip-mixup
--sampling sequential --source-order a,b | --source-order a,b is out of range; give names with ::
--source-order a | --source-order needs --sampling sequential
--save-every-steps 5 --save-most-recent | --save-most-recent does not work with --save-every-steps
--sampling random --debiased-sampling | argument --debiased-sampling: not allowed with argument --sampling
"""
OF_OPENCLIP_V3 = """--lora 4 --torchscript | --torchscript does not work with
--sort-text --torchscript | --torchscript does not work with""" * (line_here() is not OPENCLIP_V4)


@pytest.mark.parametrize("case", [*filter(None, f"{REFUSED}{OF_OPENCLIP_V3}".splitlines())])
def test_a_slip_or_a_contradiction_is_one_sentence(case):
    line, _, sentence = case.partition(" | ")
    with pytest.raises(UserError) as caught:
        parse([*DATA, *line.split()])
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "words",
    [
        "--force-image-size 16 24 --image-mean 0.5 0.4 0.3 --lr 1e-4 --siglip",
        "--freeze image --freeze text --aug-cfg 'scale=(0.6, 1.0)' use_timm=True",
        "--aug-cfg 'scale=(0.6, 1.0)' --pretrained-image --name 'my run'",
    ],
)
def test_a_table_of_flags_makes_the_words_of_which_it_is_made(words):
    assert as_arguments(settings_of(shlex.split(words))) == shlex.split(words)


def test_a_switch_for_a_value_is_an_entry_of_its_flag():
    """finetune's own --sampling stood beside the given --debiased-sampling."""
    assert settings_of(["--debiased-sampling"]) == {"sampling": "debiased"}
    assert parse_settings(["debiased-sampling", "lr="]) == {"sampling": "debiased", "lr": None}
    both = {"debiased-sampling": "", "sampling": "random"}  # which argparse refuses
    assert settings_of(as_arguments(both)) == both
    assert parse_settings(["debiased-sampling=false"]) == {"debiased-sampling": "false"}  # likewise
    with pytest.raises(UserError, match="unexpected argument '1e-4'; training flags begin with --"):
        settings_of(["1e-4"])


def test_only_what_was_typed_counts_as_given():
    """open_clip sets Adam's betas by the model after the words are read."""
    args, config = parse([*DATA, "--lr", "1e-3", "--dga-steps", "2", "--workers", "4"])
    assert args.beta2 == 0.999 and config.given == {
        "train_data": "a=/x", "lr": 1e-3, "sampling": "random", "dga_steps": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "beta2"), [("mine-vit", 0.98), ("mine", 0.999)])
def test_the_betas_of_a_model_file_follow_its_name_as_open_clips_do(tmp_path, name, beta2):
    vision = {"layers": 2, "image_size": 32}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (tmp_path / f"{name}.json").write_text(json.dumps(config))
    words = [*DATA, "--model-config", str(tmp_path / f"{name}.json")]
    assert parse(words)[0].beta2 == beta2
    assert parse([*words, "--beta2", "0.95"])[0].beta2 == 0.95
