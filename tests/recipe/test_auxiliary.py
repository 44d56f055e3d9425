"""Towers initialised from other runs and frozen, tokens dropped."""

import copy
import json
import pickle
import shutil
from argparse import Namespace

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.build import apply_methods, init_from
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.towers import (
    GROUPS,
    batch_norms,
    check_token_drop,
    freeze,
    freeze_norm_statistics,
    group_of,
)
from support.dga_reference import accumulated, batches, bert_clip, error, reference
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)
from training.model import create_model

EMBED_DIM = 24


def native(*, custom=False, seed=0, vision=None, text=None, embed_dim=EMBED_DIM):
    torch.manual_seed(seed)
    build = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    return build(
        embed_dim=embed_dim,
        vision_cfg=NATIVE_VISION | (vision or {}),
        text_cfg=CLIP_TEXT | (text or {}),
    )


def randomised(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def saved(model, path, prefix=""):
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, path)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("text") / "bert")


def timm_bert(bert, seed=0, **vision):
    torch.manual_seed(seed)
    return open_clip.CustomTextCLIP(
        embed_dim=EMBED_DIM, vision_cfg=TIMM_VISION | vision, text_cfg=bert_text(bert)
    )


# --- groups ----------------------------------------------------------------------------------------------------------


def test_every_tensor_has_its_group(bert):
    for model, image_projection, text_projection in (
        (native(), {"visual.proj"}, {"text_projection"}),
        (native(custom=True), {"visual.proj"}, {"text.text_projection"}),
        (timm_bert(bert), {"visual.head.proj.weight"}, {"text.proj.weight"}),
        (
            timm_bert(bert, timm_proj=""),
            {"visual.trunk.head.weight", "visual.trunk.head.bias"},
            {"text.proj.weight"},
        ),
    ):
        groups = {}
        for name in model.state_dict():
            groups.setdefault(group_of(name), set()).add(name)
        assert set(groups) == set(GROUPS) - {"logit_bias"}
        assert groups["image projection"] == image_projection
        assert groups["text projection"] == text_projection
        assert all(name.startswith("visual.") for name in groups["image tower"])
        assert not any(name.startswith("visual.") for name in groups["text tower"])


# --- init_from -------------------------------------------------------------------------------------------------------


IMAGE = ("image tower", "image projection", "logit_scale")


@pytest.mark.parametrize(
    ("teacher", "loaded", "words"),
    [
        # the paper's auxiliary encoder: the text tower of a run with another image tower, whose projection fits by shape alone
        (
            {"vision": {"patch_size": 16}}, ("text tower", "text projection", "logit_scale"),
            ("left: visual.positional_embedding is (5, 32) there and (17, 32) here", "left: its image tower was left"),
        ),
        ({"text": {"layers": 3}}, IMAGE, ("also has transformer.resblocks.2",)),
        ({"text": {"layers": 1}}, IMAGE, ("lacks transformer.resblocks.1",)),
        ({"embed_dim": 8}, ("image tower", "text tower", "logit_scale"), ("left: ",)),
    ],
)  # fmt: skip
def test_a_group_is_loaded_whole_or_left(tmp_path, teacher, loaded, words):
    source, student = randomised(native(**teacher)), native(seed=3)
    before = copy.deepcopy(student.state_dict())
    report = init_from(student, saved(source, tmp_path / "teacher.pt"))
    assert report.loaded == loaded and all(each in str(report) for each in words)
    for name, tensor in student.state_dict().items():
        wanted = source.state_dict() if group_of(name) in loaded else before
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("file", ["epoch_1.pt", "ddp.pt", "weights.safetensors", "."])
@pytest.mark.parametrize("custom", [False, True])
def test_everything_fits_from_every_format(tmp_path, file, custom):
    """The plain class also initialises the one with a text module. The last is a folder as `zerovl export` writes it."""
    teacher, student = randomised(native()).eval(), native(custom=custom, seed=3).eval()
    saved(teacher, tmp_path / "epoch_1.pt")
    saved(teacher, tmp_path / "ddp.pt", "module.")
    for name in ("weights.safetensors", "open_clip_model.safetensors"):
        save_file(teacher.state_dict(), tmp_path / name)
    assert len(init_from(student, tmp_path / file).loaded) == 5
    images, texts = torch.randn(2, 3, 32, 32), torch.randint(1, 99, (2, 16))
    for one, other in zip(student(images, texts), teacher(images, texts), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_no_start(tmp_path, value):
    """They would train for as long as the log is not looked at. A tower that is not loaded may hold what it likes."""
    teacher, student = randomised(native()), native(seed=3)
    with torch.no_grad():
        teacher.visual.proj[0, 0] = value
    before = copy.deepcopy(student.state_dict())
    path = saved(teacher, tmp_path / "epoch_1.pt")
    with pytest.raises(UserError, match=r"visual\.proj of .*epoch_1\.pt holds 1 numbers that are"):
        init_from(student, path)
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())
    assert "text tower" in init_from(native(vision={"patch_size": 16}), path).loaded


def test_a_checkpoint_that_fits_nowhere_is_an_error(tmp_path, bert):
    student = native()
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(
        UserError, match="no tower of .* fits this model, so nothing was loaded: image tower: the"
    ):
        init_from(student, saved(timm_bert(bert), tmp_path / "other.pt"))
    assert all(
        torch.equal(v, before[k]) for k, v in student.state_dict().items()
    )  # not even the logit scale


@pytest.mark.parametrize(
    ("text", "inner", "more", "sentence"),
    [
        (
            {"hf_pooler_type": "mean_pooler"}, {}, {},
            "text_cfg.hf_pooler_type is mean_pooler there and cls_last_hidden",
        ),
        (
            {}, {"num_attention_heads": 4}, {},
            "the text tower of .*: num_attention_heads is 4 there and 2 here; give the model that setting",
        ),
        (
            {}, {}, {"vision_cfg": {**NATIVE_VISION, "head_width": 8}},
            "the image tower of .* has the model's shapes .*: vision_cfg.head_width is 8 there",
        ),
        ({}, {}, {"quick_gelu": True}, "quick_gelu is True there and not given here"),
        # Not of the function: places, defaults that are written out, lengths and dropout of a training
        (
            {"context_length": 10}, {"hidden_dropout_prob": 0.3},
            {"vision_cfg": {**NATIVE_VISION, "mlp_ratio": 4.0, "patch_dropout": 0.5}}, None,
        ),
    ],
)  # fmt: skip
def test_a_tower_that_fits_and_computes_another_function_is_refused(
    tmp_path, bert, caplog, text, inner, more, sentence
):
    """Names and shapes are equal, and embeddings were not: text cosine 0.69 to 0.85 for another pooling."""
    folder = shutil.copytree(bert, tmp_path / "bert")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **inner}))
    name = f"function-{tmp_path.name}"
    own = register(tmp_path, name, NATIVE_VISION, bert_text(bert))
    theirs = {"vision_cfg": NATIVE_VISION, "text_cfg": bert_text(folder) | text, **more}
    other = register(tmp_path, f"{name}-other", **theirs)
    checkpoint = write_run(tmp_path / "run", random_model(other), {"model": other})
    student, config = random_model(own, seed=1), open_clip.get_model_config(own)
    if sentence is None:
        assert len(init_from(student, checkpoint, config).loaded) == 5
        assert "not compared" not in caplog.text
        return
    before = copy.deepcopy(student.state_dict())
    folder = export_local_dir(checkpoint, tmp_path / "export")
    for start in (checkpoint, folder):
        with pytest.raises(UserError, match=sentence):
            init_from(student, start, config)
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())
    # The way out: weights alone
    assert len(init_from(student, folder / "open_clip_model.safetensors", config).loaded) == 5


def test_a_tower_that_is_left_may_differ_and_a_config_that_is_gone_is_a_warning(tmp_path, caplog):
    own = register(tmp_path, "gone-own", NATIVE_VISION, CLIP_TEXT)
    other = register(
        tmp_path, "gone-other", NATIVE_VISION | {"patch_size": 16, "head_width": 8}, CLIP_TEXT
    )
    checkpoint = write_run(tmp_path / "run", random_model(other), {"model": other})
    config = open_clip.get_model_config(own)
    assert (
        init_from(random_model(own), checkpoint, config).loaded[0] == "text tower"
        and "not compared" not in caplog.text
    )
    (tmp_path / "run" / "params.txt").write_text("model: nowhere\n")
    assert init_from(random_model(own), checkpoint, config).loaded[0] == "text tower"
    assert (
        "is not compared, only names and shapes of tensors: " in caplog.text
        and "nowhere" in caplog.text
    )


def test_a_run_compares_its_config(tmp_path):
    """As `--init-from` calls it: with the run's own flags."""
    own = register(tmp_path, "run-own", NATIVE_VISION, CLIP_TEXT | {"context_length": 32})
    quick = write_run(
        tmp_path / "quick", random_model(own), {"model": own, "force_quick_gelu": True}
    )

    def create(start, name=own, **flags):
        config = RecipeConfig(init_from=str(start))
        return create_model(
            config, Namespace(precision="fp32", seed=0, **flags), name, None, **flags
        )[0]

    with pytest.raises(UserError, match="quick_gelu is True there and not given here"):
        create(quick)
    assert create(quick, force_quick_gelu=True) is not None


# --- freeze ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("kind", ["native", "custom", "timm_bert"])
def test_a_frozen_tower_does_not_learn_and_does_not_draw(kind, tower, projection, bert):
    model = {
        "native": native,
        "custom": lambda: native(custom=True),
        "timm_bert": lambda: timm_bert(bert),
    }[kind]()
    wanted = {f"{tower} tower"} | ({f"{tower} projection"} if projection else set())
    count = freeze(model, [tower], projection=projection)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert {group_of(name) for name in frozen} == wanted
    assert count == sum(p.numel() for p in frozen.values())
    assert all(
        p.requires_grad for name, p in model.named_parameters() if group_of(name) not in wanted
    )
    for step in (model.eval, model.train):
        step()
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.Identity):
                assert module.training == (
                    group_of(f"{name}.") not in wanted and step == model.train
                ), name
    for module in model.modules():
        module.train()  # one by one, as some loops do
    assert not any(
        m.training for n, m in model.named_modules() if n and group_of(f"{n}.") in wanted
    )


def test_dropout_token_drop_and_batch_norm_are_off_in_a_frozen_tower(bert):
    images, texts = batches([4], torch.float32)[0]
    model = bert_clip(torch.float32)
    with torch.no_grad():
        assert not torch.equal(
            model.encode_text(texts), model.encode_text(texts)
        )  # negative control: dropout
        assert not torch.equal(
            model.encode_image(images), model.encode_image(images)
        )  # and token drop
        freeze(model, ["text"])
        model.train()
        assert torch.equal(model.encode_text(texts), model.encode_text(texts))
        freeze(model, ["image"], projection=False)
        model.train()
        assert torch.equal(model.encode_image(images), model.encode_image(images))

    torch.manual_seed(0)
    resnet = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=resnet, text_cfg=CLIP_TEXT)
    freeze(model, ["image"])
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        model
    ).train()  # open_clip's --use-bn-sync comes after
    before = copy.deepcopy(model.visual.state_dict())
    model.encode_image(torch.randn(4, 3, 64, 64))
    assert all(torch.equal(v, before[k]) for k, v in model.visual.state_dict().items())


def convolutional(dtype=torch.float64):
    torch.manual_seed(0)
    resnet = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}
    model = open_clip.CLIP(16, resnet, CLIP_TEXT, output_dict=True).to(dtype)
    generator = torch.Generator().manual_seed(1)
    pairs = [
        (
            torch.randn(4, 3, 64, 64, generator=generator, dtype=dtype),
            torch.randint(1, 20, (4, CLIP_TEXT["context_length"]), generator=generator),
        )
        for _ in range(3)
    ]
    with torch.no_grad():  # a trained tower's statistics are not those of a batch
        for module in batch_norms(model).values():
            module.running_mean.normal_(generator=generator).mul_(0.1)
    return model, pairs


def test_frozen_norm_statistics_stay_while_the_norms_weights_train_exactly():
    """With statistics of the micro-batch (the control) the large batch is another function than one graph's."""
    model, pairs = convolutional()
    whole = [tuple(torch.cat(part) for part in zip(*pairs, strict=True))]
    control = copy.deepcopy(model).train()
    count = freeze_norm_statistics(model)
    assert count > 10 and not batch_norms(model)
    before = copy.deepcopy(dict(model.named_buffers()))
    _, wanted = reference(model.train(), ContrastiveLoss(), whole)
    _, found = accumulated(model, ContrastiveLoss(), pairs)
    assert error(found, wanted) <= 1e-10
    assert any(found[name].abs().max() > 0 for name in found if name.endswith("bn1.weight"))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    _, wanted = reference(copy.deepcopy(control), ContrastiveLoss(), whole)
    _, found = accumulated(control, ContrastiveLoss(), pairs)
    assert error(found, wanted) > 0.01
    assert not torch.equal(control.visual.bn1.running_mean, before["visual.bn1.running_mean"])


def test_channels_last_and_frozen_statistics_are_flags_of_the_model(caplog):
    model, pairs = convolutional(torch.float32)
    plain = copy.deepcopy(model)
    for each, methods in (
        (model, RecipeConfig(channels_last=True, freeze_norm_statistics=True)),
        (plain, RecipeConfig(freeze_norm_statistics=True)),
    ):
        apply_methods(each, None, methods, seed=0)
    assert model.visual.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain.visual.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    _, wanted = reference(plain.train(), ContrastiveLoss(), pairs)
    _, found = accumulated(model.train(), ContrastiveLoss(), pairs)
    assert error(found, wanted) <= 5e-4  # fp32, other convolutions


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sampling": "debiased"}, "batches of one source and leave those of the pool"),
        ({"sampling": "random"}, None),
        ({"sampling": "debiased", "freeze_norm_statistics": True}, None),
    ],
)
def test_batch_norm_beside_one_source_batches_is_named(tmp_path, caplog, flags, words):
    vision = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}
    name = register(tmp_path, f"norms-{tmp_path.name}", vision, CLIP_TEXT)
    args = Namespace(precision="fp32", seed=0, lock_image=False)
    with caplog.at_level("WARNING"):
        create_model(RecipeConfig(**flags), args, name, None)
    assert ("--freeze-norm-statistics" in caplog.text) == (words is not None)
    assert words is None or words in caplog.text


def test_a_frozen_model_is_copied_and_pickled_whole():
    model = bert_clip(torch.float32)
    freeze(model, ["text"], projection=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.text.proj.eval()
        copied.text.proj.eval()
        copied.train()
        assert not copied.text.transformer.training and copied.text.proj.training
        assert not model.text.proj.training  # the copy's train() does not reach the original


# --- token drop ------------------------------------------------------------------------------------------------------


def test_a_tower_that_ignores_token_drop_is_refused(bert):
    resnet = {"layers": [1, 1, 1, 1], "width": 16, "image_size": 64, "patch_dropout": 0.25}
    model = open_clip.CLIP(
        embed_dim=16, vision_cfg=resnet, text_cfg=CLIP_TEXT
    )  # open_clip is silent
    # by open_clip's and timm's own patch dropout, which the flag asks for
    check_token_drop(native(vision={"patch_dropout": 0.25}), 0.25)
    check_token_drop(timm_bert(bert, patch_dropout=0.25), 0.25)
    for made in (model, timm_bert(bert), native(vision={"patch_dropout": 0.5})):
        with pytest.raises(UserError, match="does not drop 0.25 of its tokens"):
            check_token_drop(made, 0.25)
