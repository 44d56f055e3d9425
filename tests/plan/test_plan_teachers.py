"""`zerovl plan` with stored teachers and several captions in a step: disk, time, memory, FLOPs, the loader."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import torch
from torch.nn.functional import normalize

import open_clip_zerovl.plan.measure as plan_measure
from open_clip_zerovl.cli.program import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import PeakBytes
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.plan.estimate import Costs, loss_bytes
from open_clip_zerovl.plan.make import make_plan
from open_clip_zerovl.plan.report import WIDTH, report
from open_clip_zerovl.plan.settings import PlanSettings
from open_clip_zerovl.plan.teachers import forward_costs
from support.dense_loss import teacher_features
from support.hash_teacher import HashEncoder
from support.reinforced import members_of
from support.tars import write_source, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, bert_text, random_model, register, write_bert, write_run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Timings of a moment: nothing here depends on how long something takes."""
    monkeypatch.setitem(plan_measure.measure_step.__kwdefaults__, "step_seconds", 0.1)
    monkeypatch.setitem(plan_measure.measure_loader.__kwdefaults__, "seconds", 0.1)


@pytest.fixture
def model(tmp_path) -> str:
    return register(tmp_path / "configs", "plan-teachers", NATIVE_VISION, CLIP_TEXT)


def settings_of(model: str, **values) -> PlanSettings:
    return PlanSettings(
        **{
            "model": model, "precision": "fp32", "device": "cpu", "batch_size": 4, "dga_steps": 2, "workers": 0, "epochs": 1,
            "sampling": "random", **values,
        }
    )  # fmt: skip


def test_shards_with_teachers_and_both_captions_are_measured(model, tmp_path):
    write_tar(tmp_path / "dr" / "00000.tar", [m for number in range(16) for m in members_of(number, "whole")])
    both = {"captions": "txt+syn.json:syn_text", "teacher": "shards:4,3"}
    data = {"train_data": f"dr={tmp_path}/dr", "logs": str(tmp_path / "logs")}
    plan = make_plan(settings_of(model, **data, **both))
    assert plan.missing == [] and plan.loader_rate > 0 and plan.compute_seconds > 0
    assert plan.teachers.widths == (4, 3) and plan.teachers.sample_bytes == 2 * 7 * 3
    text = report(plan)
    assert "embeddings of width 4, 3 in the shards" in text and max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.slow  # three plans, 8 s
def test_a_folder_of_embeddings_is_looked_at(model, tmp_path):
    write_source(tmp_path / "a", 0, 16, 16)
    data = f"a={tmp_path}/a"
    settings = TeacherSettings(views=3, image_size=32)
    embed_sources(data, [HashEncoder(salt=1)], tmp_path / "teacher", settings, progress=False)
    given = {"train_data": data, "teacher": str(tmp_path / "teacher"), "logs": str(tmp_path / "logs")}
    plan = make_plan(settings_of(model, **given))
    assert plan.missing == [] and plan.teachers.made and plan.teachers.stored_bytes == 2 * 6 * 16 * (3 + 1)
    (tmp_path / "teacher" / "a.done.npy").unlink()
    gone = make_plan(settings_of(model, **given, assume="a100", precision="amp_bf16"))
    assert ["a.done.npy is gone" in one.what for one in gone.missing] == [True]
    shutil.rmtree(tmp_path / "teacher")
    absent = make_plan(settings_of(model, **given))
    assert [one.what for one in absent.missing] == [f"teachers: {tmp_path}/teacher holds no embeddings"]
    assert absent.missing[0].advice.startswith(
        f"zerovl teacher MODEL --train-data {data} --out {tmp_path}/teacher --views 4 --image-size 32"
    )
    assert absent.teachers.stored_bytes is None and any("--teacher-model" in note for note in absent.notes)


def test_the_command_for_teachers_to_be_made_makes_what_the_run_reads(model, tmp_path, monkeypatch):
    """The plan's own words, with a checkpoint in place of a name; without the run's augmentation (control) it is refused."""
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "my data", 0, 16, 16)
    checkpoint = write_run(tmp_path / "run", random_model(model), {"model": model})
    given = {
        "train_data": "a=my data", "teacher": "teacher", "teacher_model": ("ViT-B-32",),
        "teacher_views": 2, "aug_cfg": {"scale": (0.6, 1.0)}, "auto_augment": "imagenet", "logs": str(tmp_path / "logs"),
        "on_bad_sample": "fail",
    }  # fmt: skip
    settings = settings_of(model, **given)
    lines = report(make_plan(settings)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    first = lines.index("- teachers: teacher holds no embeddings  ->") + 1
    shown = shlex.split("\n".join(lines[first:]).replace("\\\n", " "))
    assert shown[:3] == ["zerovl", "teacher", "ViT-B-32"] and shown[-2:] == ["--aug-cfg", "scale=(0.6,1.0)"]
    words = ["teacher", str(checkpoint), *shown[3:], "--device", "cpu"]
    without = [word for word in words if word not in ("--auto-augment", "imagenet")]
    for line, refused in ((without, True), (words, False)):
        shutil.rmtree("teacher", ignore_errors=True)
        assert main(line) == 0
        if refused:
            with pytest.raises(UserError, match="saw other pictures than this run shows: nothing and not AutoAugment"):
                make_plan(settings)
    plan = make_plan(settings)
    assert plan.missing == [] and plan.teachers.made and plan.loader_rate > 0 and plan.teacher_hours is None


def test_a_teachers_caption_costs_its_context_and_not_its_towers_positions(tmp_path):
    """BERT has 64 positions here; the model cuts texts to 12 tokens."""
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16}
    bert = write_bert(tmp_path / "bert")
    short, long = (
        register(tmp_path, f"teacher-context-{length}", vision, {**bert_text(bert), "context_length": length})
        for length in (12, 24)
    )
    assert forward_costs(long)[2] == pytest.approx(2 * forward_costs(short)[2], rel=0.1)


def test_disk_and_time_of_teachers_to_be_made(model, capsys):
    width, of_view, of_caption = forward_costs("ViT-B-32")
    assert width == 512 and of_view == pytest.approx(8.7e9, rel=0.05) and of_caption == pytest.approx(5.9e9, rel=0.05)
    line = [
        "--model",
        model,
        "--train-num-samples",
        "1000000",
        "--batch-size",
        "64",
        "--dga-steps",
        "4",
        "--epochs",
        "1",
    ]
    line += ["--teacher", "/nowhere/teacher", "--teacher-model", "ViT-B-32/openai", "--teacher-model", "ViT-B-32"]
    assert main(["plan", "--assume", "a100-80:8", "--json", *line]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["teachers"]["stored_bytes"] == 2 * 1024 * 10**6 * (4 + 1)
    assert plan["teachers"]["flops"] == pytest.approx(2 * 10**6 * (4 * of_view + of_caption))
    per_second = plan["sample_flops"] * 64 * 4 * 8 / plan["step_seconds"]
    assert plan["teacher_hours"] == pytest.approx(plan["teachers"]["flops"] / per_second / 3600)
    assert plan["hours_with_teachers"] == pytest.approx(plan["teacher_hours"] + plan["hours"])
    settings = {"train_data": None, "train_num_samples": 10**6, "assume": "a100-80:8", "precision": "amp_bf16"}
    taught = make_plan(
        settings_of(model, **settings, teacher="/nowhere/teacher", teacher_model=("ViT-B-32", "ViT-B-32"))
    )
    text = report(taught)
    assert "4 views: 9.5 GiB, still to be made" in text
    words = " ".join(text.split())
    assert "1,000,000 samples by ViT-B-32, ViT-B-32 in 8 calls, one a GPU (--part I/8); ESTIMATE" in words
    assert "with zerovl teacher: ESTIMATE" in words
    # Twice the texts: the difference to one caption is the text tower's own part, forward and backward.
    two = make_plan(settings_of(model, **settings, captions="txt+syn"))
    assert taught.sample_flops < two.sample_flops < 2 * taught.sample_flops
    with pytest.raises(UserError, match="open_clip knows no model 'ViT-X-99'"):
        forward_costs("ViT-X-99")
    with pytest.raises(UserError, match="no --teacher does not work with --teacher-model"):
        settings_of(model, train_data="a=/d", teacher_model=("ViT-B-32",))


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("widths", [(), (96, 96), (768, 768)])
def test_memory_of_the_loss_is_at_least_what_it_takes(texts, widths):
    """On one rank, whose gathered features are its own: what is counted is up to 2.5 times what is taken."""
    b, width, chunk = 1024, 64, 128
    images, captions = (normalize(torch.randn(rows, width)).requires_grad_() for rows in (b, texts * b))
    inputs = {"texts_per_image": texts} if texts > 1 else {}
    held = 0
    if widths:
        stored = teacher_features(b, 0, widths, dtype=torch.float16)
        inputs["teacher_features"] = [(one, torch.cat([other] * texts)) for one, other in stored]
        held = sum(part.nbytes for pair in inputs["teacher_features"] for part in pair)
    live = PeakBytes()
    with live:
        loss = ContrastiveLoss(chunk_size=chunk, distill_weight=1.0 if widths else 0.0)
        loss(images, captions, torch.tensor(50.0, requires_grad=True), **inputs).backward()
    counted = loss_bytes(Batching(b, 1, 1), width, chunk, texts, widths)
    assert live.peak + held <= counted <= 2.5 * (live.peak + held)


def test_flops_of_the_loss_grow_with_texts_and_teachers():
    batching = Batching(64, 2, 2)
    plain, two, taught = (
        Costs(0.0, 0.0, 0.0, 0.0, 0, 32, texts, widths).step_flops(batching, 1, None)
        for texts, widths in ((1, ()), (2, ()), (1, (32,)))
    )
    assert two == 2 * plain and taught == pytest.approx(plain * (1 + 4 / 4))
