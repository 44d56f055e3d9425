"""`zerovl plan`: its statements on data, batches and hardware, and that a measured micro-batch is a real one."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm.layers import AttentionPoolLatent
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from open_clip_zerovl.cli.plan import parse_plan
from open_clip_zerovl.cli.program import main
from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.plan import estimate as plan_estimate
from open_clip_zerovl.plan import measure as plan_measure
from open_clip_zerovl.plan import model as plan_model
from open_clip_zerovl.plan.batching import PlanSettings, choose_batching
from open_clip_zerovl.plan.data_check import check_data, schedule_steps
from open_clip_zerovl.plan.estimate import UTILISATION, Costs, Flops, count_costs
from open_clip_zerovl.plan.gpus import GIB, GPUS, fastest_batch, graphs_room, parse_hardware
from open_clip_zerovl.plan.make import Plan, _timed_batching, make_plan
from open_clip_zerovl.plan.model import build
from open_clip_zerovl.plan.report import WIDTH, report
from open_clip_zerovl.sampling.schedule import Batching
from scripts.paper.recipes import GRAPHS, MIB, micro_batch_for
from support import ROOT
from support.tars import png, write_source, write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    bert_text,
    register,
    write_bert,
    write_retrieval_set,
)

RECIPES = ROOT / "docs" / "recipes.md"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Timings of a moment: nothing here depends on how long something takes."""
    monkeypatch.setattr(plan_measure, "CPU_STEP_SECONDS", 0.1)


@pytest.fixture
def model(tmp_path) -> str:
    return register(
        tmp_path / "configs", "plan-tiny", NATIVE_VISION, bert_text(write_bert(tmp_path / "bert"))
    )


def settings_of(model: str = "x", **values) -> PlanSettings:
    return PlanSettings(
        **{"model": model, "train_data": "a=/nowhere", "precision": "fp32", **values}
    )


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def documented_arguments() -> list[str]:
    command = re.search(r"^zerovl train (.*?)```", RECIPES.read_text("utf-8"), re.S | re.M)
    assert command is not None
    return shlex.split(command[1].replace("\\\n", " "))


def test_the_documented_command_line_is_taken_as_it_stands():
    values = parse_plan(["--", *documented_arguments()])
    settings = PlanSettings(**{name: value for name, value in values.items() if name != "json"})
    assert (settings.batch_size, settings.dga_steps, settings.sampling) == (128, 16, "debiased")
    assert settings.aug_cfg == {"scale": (0.6, 1.0)} and settings.image_mean == (
        0.485,
        0.456,
        0.406,
    )
    assert {"--lr", "--warmup-share", "--name", "--resume"} <= set(settings.passed_over)
    assert choose_batching(settings, 8, 1).effective_batch == 16384


def test_flags_of_training_are_passed_over_in_either_form():
    line = "--model m --train-data a=/x --lr=1e-3 --zeroshot-freq 2 --resume latest --report-to tensorboard"
    found = parse_plan(line.split())["passed_over"]
    assert [flag.partition(" ")[0] for flag in found] == [
        "--lr",
        "--zeroshot-freq",
        "--resume",
        "--report-to",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--train-data a=/x", "--model"),
        ("--model m", "give --train-data"),
        ("--modle m", "there is no flag --modle; did you mean --model?"),
        ("--model m --train-data a=/x --epochs 0", "--epochs 0"),
        ("--model m --train-data a=/x --token-drop 1.5", "--token-drop 1.5"),
        ("word --model m --train-data a=/x", "unexpected argument 'word'"),
        ("--model m --train-data a=/x --assume p100:8", "--assume p100:8 is not a known GPU"),
        ("--model m --train-data a=/x --assume v100:many", "no number of GPUs"),
        ("--model m --train-data a=/x --assume v100:2 --gpus 2", "both give a number"),
        ("--model zerovl-emojo --train-data a=/x --device cpu", "did you mean zerovl-emoji"),
        ("--model m --train-data a=/x --gpus 64 --device cpu", "--gpus 64 is more than the 0 GPUs"),
    ],
)
def test_bad_input_ends_with_status_2_and_a_sentence(line, words, capsys):
    assert main(["plan", *line.split()]) == 2
    errors = [
        text for text in capsys.readouterr().err.splitlines() if text.startswith("zerovl: error: ")
    ]
    assert len(errors) == 1 and words in errors[0]


# ---------------------------------------------------------------------------------------------------------------------
# B, K, W and N
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ranks", "fits", "expected"),
    [
        ({}, 1, 512, (64, 1)),  # open_clip's default
        ({"batch_size": 128, "dga_steps": 16}, 8, 1, (128, 16)),
        ({"effective_batch": 16384}, 8, 128, (128, 16)),
        ({"effective_batch": 16384}, 1, 512, (512, 32)),
        ({"effective_batch": 64}, 8, 128, (8, 1)),  # no more than each rank needs
        ({"effective_batch": 16384, "batch_size": 32}, 8, 128, (32, 64)),
        ({"effective_batch": 16384, "dga_steps": 4}, 8, 128, (512, 4)),
        ({"effective_batch": 1000}, 3, 64, (64, 5)),  # 960: the nearest
    ],
)
def test_batches(given, ranks, fits, expected):
    batching = choose_batching(settings_of(**given), ranks, fits)
    assert (batching.micro_batch, batching.dga_steps) == expected
    assert batching.effective_batch == expected[0] * expected[1] * ranks


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"effective_batch": 100, "batch_size": 8, "dga_steps": 2},
            "--effective-batch 100 is not --batch-size 8 x --dga-steps 2 x 2 ranks = 32",
        ),
        (
            {"batch_size": 8, "dga_steps": 4, "dga_retain": 4},
            "--dga-retain 4 is out of range .* 0 to 3",
        ),
    ],
)
def test_batches_that_contradict_each_other_are_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        choose_batching(settings_of(**given), 2, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Hardware
# ---------------------------------------------------------------------------------------------------------------------


def test_hardware_table():
    assert parse_hardware("v100:8") == (GPUS["v100"], 8)
    assert parse_hardware("H200") == (GPUS["h200"], 1)
    assert parse_hardware("A100_80:4") == (GPUS["a100-80"], 4)
    assert not GPUS["v100"].bf16 and GPUS["a100"].bf16
    with pytest.raises(UserError, match="v100, v100-16"):
        parse_hardware("tpu")


@pytest.mark.parametrize(
    ("memory_gib", "size"),
    [(32, 128), (31.7, 128), (16, 64), (15.8, 64), (24, 64), (40, 128), (80, 256), (141, 512)],
)
def test_micro_batch_for_a_gpus_memory(memory_gib, size):
    assert micro_batch_for(memory_gib) == size


@pytest.mark.parametrize(
    ("ranks", "memory_gib", "expected"),
    [
        (8, 32, (128, 16, 3)),  # V100: 1.271, where one graph kept costs 1.313
        (1, 141, (512, 32, 3)),  # H200: 128 x 128 with 15 kept is 0.6 % faster by the count alone
        (8, 141, (128, 16, 15)),  # 1.021; 512 x 4 with three kept 1.083
        (8, 80, (512, 4, 2)),
        (1, 8, (32, 512, 1)),  # 128 do not fit
        (1, 2, (1, 16384, 0)),  # nothing does
    ],
)
def test_micro_batch_steps_and_graphs_are_chosen_together(ranks, memory_gib, expected):
    sample_mib, fixed_gib = GRAPHS["zerovl-ViT-B-16-BERT-base", "0.25", None]
    room = graphs_room(memory_gib)
    batch = fastest_batch(16384, ranks, room, sample_mib * MIB, fixed_gib * GIB)
    assert (batch.micro_batch, batch.dga_steps, batch.retained) == expected
    if batch.retained:
        assert batch.retained * batch.micro_batch * sample_mib * MIB + fixed_gib * GIB <= room


def test_one_graph_asked_for_takes_the_largest_micro_batch_of_about_the_least_time():
    batch = fastest_batch(16384, 8, 70 * GIB, 60 * MIB, 3 * GIB, most=1)
    every = [
        1 + (k - 1) / (3 * k) for k in (16, 8, 4)
    ]  # 128, 256, 512; 1,024 would leave no room for a mistake
    assert batch.dga_steps == 4 and batch.relative_time == pytest.approx(min(every))


@pytest.mark.parametrize(
    ("wanted", "ranks", "expected"), [(1024, 3, (128, 3)), (1024, 8, (128, 1)), (96, 1, (96, 1))]
)
def test_the_batch_wanted_comes_before_speed(wanted, ranks, expected):
    batch = fastest_batch(wanted, ranks, 30 * GIB, 75 * MIB, 3 * GIB)
    assert (batch.micro_batch, batch.dga_steps) == expected


def bert_base(folder: Path) -> str:
    """A text tower of BERT-base's shape, without weights and with few words."""
    write_bert(folder)
    BertConfig().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow  # builds the paper's towers: 2 minutes
def test_the_launchers_bytes_are_those_counted(tmp_path):
    tower = bert_base(tmp_path / "bert-base")
    for (name, token_drop, frozen), (sample_mib, fixed_gib) in GRAPHS.items():
        drop = None if token_drop is None else float(token_drop)
        frozen_towers = () if frozen is None else (frozen,)
        text_model = tower if "BERT" in name else None
        settings = settings_of(name, token_drop=drop, freeze=frozen_towers, text_model=text_model)
        costs = count_costs(build(settings, CPU, "amp_bf16"))
        assert costs.sample_bytes / MIB == pytest.approx(sample_mib, rel=0.02)
        assert (costs.state_bytes + costs.fixed_bytes) / GIB == pytest.approx(fixed_gib, rel=0.02)


def test_a_plan_for_an_effective_batch_keeps_the_graphs_that_fit():
    assert parse_plan(["--model", "x", "--effective-batch", "64"])["dga_retain"] == "auto"
    assert (
        parse_plan(["--model", "x", "--effective-batch", "64", "--dga-retain", "1"])["dga_retain"]
        == 1
    )
    assert "dga_retain" not in parse_plan(["--model", "x"])


@pytest.mark.slow  # builds ViT-B/16 and BERT-base and takes two steps
def test_flops_of_the_papers_run_are_counted_right(tmp_path):
    settings = settings_of(
        "zerovl-ViT-B-16-BERT-base", text_model=bert_base(tmp_path / "bert-base")
    )
    planned = build(settings, CPU, "fp32")
    costs = count_costs(planned)
    hours = plan_estimate.PAPER_FLOPS * plan_estimate.PAPER_SAMPLES / (UTILISATION * 125e12) / 3600
    assert hours == pytest.approx(680) and 0.05 < UTILISATION < 0.5
    assert costs.replayed_flops == pytest.approx(plan_estimate.PAPER_FLOPS, rel=2e-3)
    assert planned.parameters[0] == pytest.approx(195.5e6, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Counting and measuring
# ---------------------------------------------------------------------------------------------------------------------


def test_counted_flops_are_those_of_forward_and_backward(model):
    planned = build(settings_of(model), CPU, "fp32")
    images, texts = planned.prepare(*planned.micro_batch(1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward, torch.no_grad():
        planned.model(images, texts)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as both:
        outputs = planned.model(images, texts)
        (outputs["image_features"].sum() + outputs["text_features"].sum()).backward()
    costs = count_costs(planned)
    assert costs.retained_flops == both.get_total_flops()
    assert costs.replayed_flops == forward.get_total_flops() + both.get_total_flops()
    # By hand: the image tower's products with weights, on 16 patches and a class token.
    width, tokens, layers, patch = 32, 17, 2, 8
    weights = layers * 12 * width * width
    by_hand = 2 * (tokens * weights + 16 * 3 * patch * patch * width + width * 24)
    by_hand += layers * 4 * tokens * tokens * width  # attention
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as image_tower,
        torch.no_grad(),
    ):
        planned.model.encode_image(images)
    assert image_tower.get_total_flops() == pytest.approx(by_hand, rel=0.02)


def test_shapes_alone_cost_what_a_step_costs(model, monkeypatch):
    planned = build(settings_of(model, token_drop=0.5), CPU, "amp_bf16")
    before = planned.model.state_dict(keep_vars=True)
    costs = count_costs(planned)
    monkeypatch.setattr(plan_estimate, "LARGE_PARAMETERS", 0)
    by_shapes = count_costs(planned)
    after = planned.model.state_dict(keep_vars=True)
    assert all(after[key] is tensor for key, tensor in before.items())
    for each in ("sample_bytes", "fixed_bytes"):
        assert getattr(by_shapes, each) == pytest.approx(getattr(costs, each), rel=5e-3)
        by_shapes = replace(by_shapes, **{each: getattr(costs, each)})
    assert by_shapes == costs


def test_flops_of_an_attention_pool_are_counted_without_gradients():
    """Its query is a view of a parameter, at which torch's own counter ends (it is the control here)."""
    pool, tokens = AttentionPoolLatent(8, num_heads=2), torch.ones(2, 5, 8)
    with torch.no_grad(), pytest.raises(AssertionError), FlopCounterMode(display=False):
        pool(tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Flops() as counter:
        pool(tokens)
    products = (
        1 * 8 * 8 + 5 * 8 * 16 + 2 * 5 * 8 + 1 * 8 * 8 + 2 * 1 * 8 * 32
    )  # q, kv, attention, projection, MLP
    assert counter.total == 2 * 2 * products


def test_frozen_tower_and_token_drop_cost_less(model):
    whole = count_costs(build(settings_of(model), CPU, "fp32"))
    frozen_model = build(settings_of(model, freeze=("text",)), CPU, "fp32")
    frozen = count_costs(frozen_model)
    dropped = count_costs(build(settings_of(model, token_drop=0.5), CPU, "fp32"))
    assert (
        dropped.retained_flops < whole.retained_flops and dropped.sample_bytes < whole.sample_bytes
    )
    assert frozen.retained_flops < whole.retained_flops and frozen.state_bytes < whole.state_bytes
    # A frozen tower is forwarded once in a replayed micro-batch, too: the replay adds the image tower's pass alone.
    assert (
        frozen.replayed_flops - frozen.retained_flops < whole.replayed_flops - whole.retained_flops
    )
    total, trained = frozen_model.parameters
    assert frozen.state_bytes == 4 * total + 8 * trained


def test_memory_grows_with_micro_batch_and_graphs_kept(model):
    costs = count_costs(build(settings_of(model), CPU, "fp32"))
    few, many = (choose_batching(settings_of(batch_size=b, dga_steps=8), 1, 1) for b in (4, 16))
    assert costs.sample_bytes > 0 and costs.fixed_bytes > 0
    assert costs.peak_bytes(few, 1) < costs.peak_bytes(few, 4) < costs.peak_bytes(many, 4)
    assert replace(costs, loss_chunk=4).peak_bytes(many, 4) < costs.peak_bytes(many, 4)
    assert costs.graphs_kept(few, "auto", costs.peak_bytes(few, 3) / 0.9 + 1) == 3
    assert costs.graphs_kept(few, "auto", 1e12) == 8 and costs.graphs_kept(few, 5, 0) == 5
    assert costs.graphs_kept(few, "auto", 0) == 1


def two_sources(tmp_path: Path) -> str:
    a = write_source(tmp_path / "a", 0, 40, 10)
    b = write_source(tmp_path / "b", 1000, 30, 10)
    return f"a={a}::b={b}"


@pytest.mark.parametrize(("workers", "retain", "steps"), [(0, 1, 2), (1, "auto", 6)])
def test_measured_plan(model, tmp_path, workers, retain, steps):
    settings = settings_of(
        model,
        train_data=two_sources(tmp_path),
        sampling="debiased",
        device="cpu",
        batch_size=4,
        dga_steps=steps,
        dga_retain=retain,
        workers=workers,
        epochs=3,
        coin_flip_mixup=True,
        text_augment=0.2,
        auto_augment="imagenet",
        logs=str(tmp_path / "logs" / "deep"),
    )
    plan = make_plan(settings)
    assert plan.data.missing == [] and not plan.estimate
    assert plan.compute_seconds > 0 and plan.data_seconds > 0 and plan.peak_bytes > 0
    assert plan.step_seconds == plan.compute_seconds + plan.data_seconds
    assert (plan.timed.dga_steps, plan.timed.retained) == ((2, 1) if retain == 1 else (4, 4))
    assert plan.retained == (1 if retain == 1 else steps)
    n = 4 * steps
    assert plan.batching.effective_batch == n and plan.data.steps == 40 // n + 30 // n
    assert plan.steps == 3 * plan.data.steps
    assert [source.left_over for source in plan.data.sources] == [40 % n, 30 % n]
    assert plan.free_disk_bytes > 0 and not (tmp_path / "logs").exists()
    text = report(plan)
    assert "measured on" in text and "ESTIMATE" not in text and "Nothing is missing." in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(("limit", "least", "most"), [(0.0, 1, 1), (5.0, 2, 5)])
def test_a_step_that_takes_all_the_time_is_the_only_one(
    model, tmp_path, monkeypatch, limit, least, most
):
    """On a busy CPU a step of ViT-B/16 takes a minute, of which a second one was taken."""
    taken, take = [], plan_measure.RecipeStep.take
    monkeypatch.setattr(
        plan_measure.RecipeStep, "take", lambda *given: taken.append(take(*given)) or taken[-1]
    )
    monkeypatch.setattr(plan_measure, "CPU_STEP_SECONDS", limit)
    monkeypatch.setattr(plan_measure, "MOST_STEPS", 4)
    data, logs = two_sources(tmp_path), str(tmp_path / "logs")
    where = {"train_data": data, "device": "cpu", "workers": 0, "logs": logs}
    plan = make_plan(settings_of(model, batch_size=4, dga_steps=2, **where))
    assert least <= len(taken) <= most and plan.compute_seconds > 0


@pytest.mark.parametrize("precision", ["amp", "amp_bf16"])
def test_open_clips_own_towers_in_mixed_precision(tmp_path, precision):
    name = register(tmp_path / "configs", f"plan-clip-{precision}", NATIVE_VISION, CLIP_TEXT)
    where = {"train_data": two_sources(tmp_path), "device": "cpu", "logs": str(tmp_path)}
    plan = make_plan(settings_of(name, precision=precision, effective_batch=20, workers=0, **where))
    assert plan.step_seconds > 0 and plan.data.missing == []
    assert (plan.batching.micro_batch, plan.batching.dga_steps) == (16, 1)
    assert any("effective batch is 16 instead of 20" in note for note in plan.data.notes)


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def missing_of(**values) -> dict[str, str]:
    found = (one.rpartition("; ") for one in check_data(settings_of(**values)).missing)
    return {fault: advice for fault, _, advice in found}


def scheduled(train_data: str, batch: int, **values):
    settings = settings_of(train_data=train_data, **values)
    data = check_data(settings)
    schedule_steps(settings, data, batch)
    return data


def test_sources_table(tmp_path):
    write_source(tmp_path / "c", 5000, 7, 5, sizes=False)
    three = two_sources(tmp_path) + f"::c={tmp_path}/c"
    data = scheduled(three, 7, sampling="debiased")
    assert [(s.name, s.pairs, s.steps, s.left_over) for s in data.sources] == [
        ("a", 40, 5, 5), ("b", 30, 4, 2), ("c", 7, 1, 0),
    ]  # fmt: skip
    assert data.missing == [] and data.steps == 10
    assert data.sources[2].state == "counted, no sizes.json"
    assert any(
        "no sizes.json" in note and f"zerovl data index {tmp_path}/c" in note for note in data.notes
    )
    (few,) = (note for note in data.notes if "fewer than 20 steps" in note)
    assert few.startswith(
        "3 of 3 sources fill fewer than 20 steps of 7 an epoch: c (1), b (4), a (5). Debiased sampling"
    )
    mixed = scheduled(three, 7, sampling="random")
    assert mixed.steps == 11 and all(source.steps is None for source in mixed.sources)
    assert not any("fewer than" in note for note in mixed.notes)
    with pytest.raises(
        UserError,
        match="--source-order a::b must name each source once, separated by '::', as a::b::c",
    ):
        scheduled(three, 7, sampling="sequential", source_order="a::b")


def test_a_source_smaller_than_a_batch_is_named(tmp_path):
    (missing,) = scheduled(two_sources(tmp_path), 32, sampling="debiased").missing
    assert "source 'b' gives 30 samples" in missing and "; lower --batch-size" in missing


def test_wrong_sizes_json_is_named(tmp_path):
    train_data = two_sources(tmp_path)
    sizes = tmp_path / "a" / "sizes.json"
    sizes.write_text(json.dumps({**json.loads(sizes.read_text()), "00003.tar": 12}))
    (what, advice), *others = missing_of(train_data=train_data).items()
    assert not others and "00003.tar holds 10 samples, its sizes.json says 12" in what
    assert advice == f"zerovl data index {tmp_path}/a"


def test_missing_shard_and_missing_folder_are_named(tmp_path):
    train_data = two_sources(tmp_path)
    (tmp_path / "a" / "00001.tar").unlink()
    found = missing_of(train_data=f"{train_data}::sbu={tmp_path}/sbu::own={tmp_path}/own")
    assert [what.partition(":")[0] for what in found] == ["a", "sbu", "own"]
    assert "1 of 4 shards are missing, first" in next(iter(found))
    assert found[f"sbu: there is no {tmp_path}/sbu"] == f"zerovl data sbu --out {tmp_path}/sbu"
    assert found[f"own: there is no {tmp_path}/own"].startswith("correct the path")
    folder = missing_of(train_data=f"a={tmp_path}/a")  # where only sizes.json knows of it
    assert "1 of 4 shards are missing, first" in next(iter(folder)) and "00001.tar" in next(
        iter(folder)
    )
    braces = missing_of(train_data=f"sbu={tmp_path}/sbu/{{00000..00086}}.tar")
    assert braces == {f"sbu: there is no {tmp_path}/sbu": f"zerovl data sbu --out {tmp_path}/sbu"}


def test_an_undecodable_first_sample_and_a_torn_shard_are_named(tmp_path):
    write_tar(tmp_path / "bad" / "0.tar", [("0.png", b"no picture"), ("0.txt", b"a cat")])
    good = write_tar(
        tmp_path / "torn" / "0.tar",
        [("0.png", png((1, 2, 3))), ("0.txt", b"a"), ("1.txt", b"x" * 5000)],
    )
    (tmp_path / "torn" / "sizes.json").write_text('{"0.tar": 2}')
    good.write_bytes(good.read_bytes()[:4000])
    found = list(missing_of(train_data=f"bad={tmp_path}/bad::torn={tmp_path}/torn"))
    assert "its first sample cannot be used" in found[0] and "cannot be decoded" in found[0]
    assert "torn/0.tar" in found[1] and len(found) == 2


def test_retrieval_sets(tmp_path):
    write_retrieval_set(tmp_path / "coco", [5, 5, 4])
    data = check_data(settings_of(retrieval_data=f"coco={tmp_path}/coco::f30k={tmp_path}/f30k"))
    assert data.retrieval["coco"] == "3 images, 14 captions"
    assert any(one.endswith(f"; zerovl data f30k --out {tmp_path}/f30k") for one in data.missing)


# ---------------------------------------------------------------------------------------------------------------------
# Whole plans
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_missing_gives_status_1(model, tmp_path, capsys):
    line = f"--model {model} --train-data {two_sources(tmp_path)}::cc3m={tmp_path}/cc3m --device cpu".split()
    line += ["--batch-size", "4", "--workers", "0", "--precision", "fp32", "--logs", str(tmp_path)]
    assert main(["plan", *line]) == 1
    out = capsys.readouterr().out
    words = " ".join(out.replace("\\\n", "").split())  # a long path begins a line of its own
    assert (
        f"- cc3m: there is no {tmp_path}/cc3m" in words
        and f"zerovl data cc3m --out {tmp_path}/cc3m" in words
    )
    assert main(["plan", "--", *line[:3], two_sources(tmp_path), *line[4:]]) == 0


def test_assumed_hardware_is_labelled_and_needs_no_data(model, capsys):
    line = (
        f"--model {model} --train-data sbu=/nowhere/sbu::vg=/nowhere/vg --debiased-sampling".split()
    )
    line += ["--effective-batch", "16384", "--epochs", "20", "--dga-retain", "1"]
    assert main(["plan", "--assume", "v100:8", *line]) == 1  # how many pairs there are is not known
    out = capsys.readouterr().out
    assert (
        "steps of an epoch are not known: --train-num-samples" in out
        and "sbu: there is no /nowhere/sbu" in out
    )
    line += ["--train-num-samples", "1360000"]
    assert main(["plan", "--assume", "v100:8", *line]) == 0
    out = capsys.readouterr().out
    assert "ESTIMATE for 8x V100 32 GB" in out and "Nothing is missing." in out
    assert (
        "micro-batch 2048 x 1 DGA steps x 8 ranks = effective batch 16,384" in out
    )  # so small a model fits whole
    assert "83 steps an epoch x 20 = 1,660 steps" in out and "/nowhere" not in out
    assert max(map(len, out.splitlines())) <= WIDTH

    assert main(["plan", "--assume", "h200", "--json", *line]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["estimate"] and plan["batching"] == {
        "micro_batch": 16384, "dga_steps": 1, "ranks": 1, "effective_batch": 16384,
    }  # fmt: skip
    assert plan["gpu_hours"] == pytest.approx(plan["steps"] * plan["step_seconds"] / 3600)
    assert plan["step_seconds"] > 0 and plan["missing"] == []
    (note,) = (
        one for one in plan["notes"] if "zerovl align" in one
    )  # one forward pass of each pair at the step's rate
    forward = plan["costs"]["replayed_flops"] - plan["costs"]["retained_flops"]
    seconds = forward / plan["sample_flops"] * plan["compute_seconds"] / 16384 * 83 * 16384
    assert (
        f"encoding {83 * 16384:,} pairs once takes {duration(seconds)} of one device and " in note
    )
    assert note.endswith("and in memory the rows and 16 GiB.") and note.startswith("ESTIMATE ")


def test_estimate_follows_flops_and_peak(model):
    def seconds(gpu: str, **values) -> float:
        data = {"train_data": None, "train_num_samples": 10**6, "batch_size": 8, "dga_steps": 16}
        return make_plan(
            settings_of(model, precision="amp", assume=gpu, **{**data, **values})
        ).step_seconds

    assert seconds("h100") / seconds("v100") == pytest.approx(125 / 989)
    assert seconds("v100", dga_retain=16) < seconds("v100") < seconds("v100", dga_retain=0)


def test_too_little_memory_is_missing_with_a_way_out(model):
    settings = settings_of(
        model,
        train_data=None,
        train_num_samples=10**7,
        assume="t4",
        batch_size=2**18,
        dga_steps=1,
        precision="amp",
    )
    (missing,) = make_plan(settings).data.missing
    assert missing.startswith("memory:") and f"; --batch-size {2**17} --dga-steps 2" in missing


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, 21),  # and one that is being written
        ({"save_every_steps": 500}, 23),
        ({"save_frequency": 0}, 2),
        ({"save_frequency": 8}, 4),  # 8, 16 and the last
        ({"delete_previous_checkpoint": True}, 2),
    ],
)
def test_checkpoints_that_are_kept(given, kept):
    assert Plan(settings_of(epochs=20, **given), *[None] * 6).checkpoints == kept


def test_a_text_tower_that_is_not_here_is_named(tmp_path, model):
    text = {
        **bert_text(tmp_path / "bert"),
        "hf_model_name": "nobody/no-tower",
        "hf_tokenizer_name": "nobody/no-tower",
    }
    name = register(tmp_path / "configs", "plan-hub", NATIVE_VISION, text)
    with pytest.raises(UserError, match=r"nobody/no-tower .*(--text-model|text model)"):
        build(settings_of(name), CPU, "fp32")
    build(settings_of(name, text_model=str(tmp_path / "bert")), CPU, "fp32")


def test_files_that_are_not_there_are_missing(model, tmp_path):
    """And a file that is there is not missing."""
    (tmp_path / "image.pt").touch()
    settings = settings_of(
        model,
        train_data=f"a={tmp_path}/a",
        init_image=str(tmp_path / "image.pt"),
        pretrained=str(tmp_path / "weights.pt"),
        device="cpu",
    )
    write_source(tmp_path / "a", 0, 100, 50)
    plan = make_plan(settings)
    (weights,) = plan.data.missing
    assert weights.startswith(f"--pretrained: there is no {tmp_path}/weights.pt; ")


def test_weights_of_pretrained_are_a_file_in_the_cache_or_to_be_fetched(monkeypatch, tmp_path):
    """A tag's weights have one of the names that open_clip looks for; nothing is read, nothing fetched."""
    cached: set[tuple[str, str]] = set()

    def from_cache(repository: str, file: str, cache_dir: str | None = None) -> str | None:
        return file if (repository, file) in cached and cache_dir in (None, "here") else None

    monkeypatch.setattr(plan_model, "try_to_load_from_cache", from_cache)

    def absent(pretrained: str, model: str = "ViT-B-32", **more) -> dict[str, str]:
        return plan_model.weights_to_fetch(settings_of(model, pretrained=pretrained, **more))

    tag, repo = "laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
    assert absent("") == {} and absent(tag) == {
        f"the weights {tag} of ViT-B-32": "--pretrained FILE"
    }
    for name in ("open_clip_pytorch_model.bin", "open_clip_model.safetensors"):
        cached.add((repo, name))
        assert absent(tag) == absent(tag, "ViT-B/32") == absent(tag, cache_dir="here") == {}
        assert absent(tag, cache_dir="elsewhere")
        cached.clear()
    cached.add((repo, "README.md"))
    assert absent(tag)
    # A file's weights are of all towers, so that none of an image tower are fetched beside them.
    assert absent(str(tmp_path / "weights.pt"), "convnext_base", pretrained_image=True) == {}
    assert absent("", "convnext_base", pretrained_image=True)
    with pytest.raises(
        UserError,
        match=r"--pretrained nothing is neither a file nor a tag of ViT-B-32; its tags are openai, ",
    ):
        absent("nothing")
    with pytest.raises(
        UserError, match=r"--pretrained laion2b_s34b_b79k does not work with --text-model"
    ):
        absent(tag, text_model="bert")


@pytest.mark.parametrize(("gigaflops", "micro_batch"), [(120, 2), (0.01, 64), (9000, 1)])
def test_a_step_on_a_cpu_is_timed_on_micro_batches_that_take_seconds(gigaflops, micro_batch):
    """ViT-B/16 with BERT-base at a batch of 64 and four micro-batches took minutes a step, and 8 GB."""
    flops = gigaflops * 1e9
    costs = Costs(flops, flops, sample_bytes=1, fixed_bytes=1, state_bytes=1, embed_dim=8)
    run = Batching(64, 16, 1)
    timed = _timed_batching(costs, run, torch.device("cpu"))
    assert timed == Batching(micro_batch, 16, 1)
    assert _timed_batching(costs, run, torch.device("cuda")) == run
