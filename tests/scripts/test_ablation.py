"""`make ablation`: flags, sources, order and failures of runs, choices; and the demo's trainings, which share its flags."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.launch import TrainingProcess
from open_clip_zerovl.shards.members import Sample, read_samples
from open_clip_zerovl.shards.writing import write_retrieval_set, write_source
from scripts import demo
from scripts.ablation import measuring, protocol, report, rows, run, sources
from scripts.ablation.jobs import Ablation, Job
from scripts.ablation.measuring import Ended, Measurements, thinned, unseen_pools
from scripts.ablation.protocol import (
    ALL_UNSEEN,
    CONDITIONS,
    MINIATURES,
    PILOT_SEEDS,
    QUICK,
    TABLES,
    read_choices,
)
from scripts.ablation.raw_probe import probe_mixture
from scripts.ablation.run import Processes
from scripts.drawn import training as drawn_training
from scripts.drawn.emoji import EMOJI
from scripts.drawn.make import DrawnSample
from scripts.drawn.training import TrainingRun, drawn_flags, flag_values, grouped, read_loss_curve
from scripts.paper import context_bias
from support.tars import encoded
from support.tiny_clip import write_bert
from training.params import parse

# --- flags and logs --------------------------------------------------------------------------------------------------


def test_flags_replace_those_of_the_same_name_and_keep_the_rest(tmp_path):
    def flags(*more: str) -> list[str]:
        return drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)

    base, more = flags(), ["--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--lr=2e-3"]
    changed = {
        **flag_values(base),
        "--aug-cfg": ["scale=(0.6,1.0)"],
        "--coin-flip-mixup": [],
        "--lr": ["2e-3"],
    }
    assert flag_values(flags(*more)) == changed and flags(*more)[-2:] == ["--lr", "2e-3"]
    assert len(flags(*more)) == len(set(flag_values(flags(*more)))) + sum(
        map(len, changed.values())
    )
    assert "--warmup-share" not in flags("--warmup", "5")
    # A flag that may come twice comes twice.
    assert flags("--freeze", "text", "--freeze", "image")[-4:] == [
        "--freeze",
        "text",
        "--freeze",
        "image",
    ]
    with pytest.raises(UserError, match="begin with --.*'0.2'"):
        flags("0.2")


def test_the_demo_takes_training_flags_but_not_those_that_it_compares():
    settings = demo.Settings(
        Path("data"), Path("out"), 3, 7, "val", ("--lr", "5e-4", "--epochs", "5")
    )
    demo.check_flags(settings.flags)
    for own in ("--sampling", "--train-data=x", "--name"):
        with pytest.raises(UserError, match=r"the demo sets --\S+ itself: .*; leave it out"):
            demo.check_flags(["--coin-flip-mixup", own, "x"])
    flags = flag_values(settings.run_of("random").flags)
    assert [flags[f"--{name}"] for name in ("lr", "epochs", "seed", "sampling")] == [
        ["5e-4"],
        ["5"],
        ["7"],
        ["random"],
    ]


@pytest.mark.parametrize(("scores", "at_chance"), [((19.2, 18.4), True), ((19.0, 33.0), False)])
def test_the_demo_says_when_both_models_are_at_chance(scores, at_chance):
    sides = {name: {"value": score} for name, score in zip(demo.SAMPLINGS, scores, strict=True)}
    words = demo.judgement({"measures": {"within": {"sides": sides}}}, 2)
    sentence = (
        "At chance: RSUM within a source is 19 (random) and 18 (debiased), a random order has 16."
    )
    assert (sentence in words) == ("At chance" in words) == at_chance


def test_a_run_of_other_flags_is_not_taken_for_finished(tmp_path):
    def of(*more: str) -> TrainingRun:
        flags = drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)
        return TrainingRun(tmp_path / "runs" / "random", tuple(flags))

    done = of()
    done.checkpoint.parent.mkdir(parents=True)
    done.checkpoint.touch()
    assert not done.is_finished  # nobody knows with which flags it was trained
    done.asked.write_text(json.dumps({"flags": list(done.flags), "ranks": 1}))
    assert done.is_finished and of().is_finished
    assert not of("--text-augment", "0.2").is_finished
    assert not TrainingRun(done.folder, done.flags, ranks=2).is_finished


def test_a_training_log_of_open_clip_is_read_and_thinned_by_means(tmp_path):
    """The total "Loss", not a part of it; of a step repeated after a resume the last line counts; nan is kept."""
    tail = "Data (t): 0.1 LR: 0.000100 Logit Scale: 50.000"
    lines = [
        f"Train Epoch: 0 [  64/5703 (1%)] {tail} Contrastive_loss: 4.1589 (4.2000) Loss: 4.1590 (4.2000)",
        f"Train Epoch: 0 [5703/5703 (100%)] {tail} Loss: nan (nan)",
        f"Train Epoch: 1 [  64/5703 (1%)] {tail} Loss: nan (nan)",
        f"Train Epoch: 1 [  64/5703 (1%)] {tail} Loss: 1.5e-05 (2.0)",
        "Eval Epoch: 1 Loss: 9.0000 (9.0)",
    ]
    (tmp_path / "out.log").write_text("\n".join(lines))
    curve = read_loss_curve(tmp_path / "out.log")
    assert curve[0] == (64, 4.159) and curve[2:] == [(5767, 1.5e-05)] and math.isnan(curve[1][1])
    with pytest.raises(UserError, match="no step was logged"):
        read_loss_curve(tmp_path / "absent.log")
    straight = [(64 * i, float(i)) for i in range(1, 11)]
    assert (
        thinned(straight, 5) == [(64 * i, i - 0.5) for i in (2, 4, 6, 8, 10)]
        and thinned(straight) == straight
    )


def test_the_log_format_is_the_one_that_open_clip_writes():
    """open_clip_train formats the line inside its loop, so that the test reads its source."""
    train = pytest.importorskip("open_clip_train.train")
    source = Path(train.__file__).read_text(encoding="utf-8")
    assert 'f"Train Epoch: {epoch} [{num_samples:>{sample_digits}}/{samples_per_epoch} ' in source
    # 3.3: "{loss_name.capitalize()}: {loss_m.val:#.5g} ({loss_m.avg:#.5g})"; 4 breaks the same line after the value
    assert re.search(
        r'\{(loss_)?name\.capitalize\(\)\}: \{(loss_)?m\.val:#\.5g\} ("\s+f")?\(\{', source
    )


# --- the protocol ----------------------------------------------------------------------------------------------------


def ablation_in(folder: Path, choices=QUICK, split: str = "test", out: str = "out") -> Ablation:
    return Ablation(
        {name: folder / "data" / name for name in MINIATURES}, folder / out, choices, split
    )


@pytest.mark.parametrize("name", CONDITIONS)
def test_open_clips_parser_takes_every_condition(name, tmp_path):
    job = Job(1, name)
    training = ablation_in(tmp_path).training_run(job)
    args, config = parse([*training.flags, "--logs", "x", "--name", "y"])
    condition = CONDITIONS[name]
    # Nothing differs from the demo's flags but the flags that the condition names.
    assert (
        args.epochs == condition.run_epochs(QUICK)
        and args.seed == 1
        and config.sampling == condition.sampling
    )
    data = tmp_path / "data" / condition.miniature
    plain = drawn_flags(
        data, sampling=condition.sampling, epochs=args.epochs, seed=1, sources=job.trained
    )
    flags = condition.run_flags(QUICK)
    named = {*flag_values(flags), "--init-from", "--save-frequency"}
    named |= {"--train-data"} if condition.kind != "plain" else set()
    named |= {"--teacher"} if condition.teacher else set()
    ours, theirs = (
        [group for group in grouped(f) if group[0] not in named] for f in (training.flags, plain)
    )
    assert ours == theirs and not any("{" in flag for flag in training.flags)
    assert ("--init-from" in training.flags) == (condition.init_from is not None)


def test_a_run_is_scored_in_the_source_that_it_does_not_see():
    """Eight seeds leave each of four sources out twice, and the pilots have other seeds."""
    for name in ("debiased", "icons-debiased", "clusters", "one-random"):
        every = [*MINIATURES[CONDITIONS[name].miniature].sources]
        jobs = [Job(seed, name) for seed in protocol.SEEDS]
        assert [job.unseen for job in jobs] == [*every, *every]
        assert all(job.unseen not in job.trained for job in jobs)
        assert {len(job.trained) for job in jobs} == {1 if name == "one-random" else 3}
    assert Job(0, "last-noto").unseen is None and len(Job(0, "last-noto").trained) == 4
    assert not set(PILOT_SEEDS) & set(protocol.SEEDS)


def test_the_tables_name_conditions_that_are_there_and_use_all():
    used = {name for table in TABLES for name in table.conditions}
    assert (
        set(CONDITIONS) - used
        == {needs for one in CONDITIONS.values() for needs in one.needs} - used
    )
    assert all(needs in CONDITIONS for one in CONDITIONS.values() for needs in one.needs)
    for one in (one for table in TABLES for one in table.comparisons):
        assert {one.run, one.against} <= set(CONDITIONS)
        if one.paper and one.claim != "same":  # the claim is that of the paper's own numbers
            assert {
                (a > b) == (one.claim == "higher") for a, b in zip(*one.paper, strict=True)
            } == {True}
        # Two conditions that are compared are scored by the same number, on the same source.
        pair = [Job(3, name) for name in (one.run, one.against)]
        assert (
            len({(job.condition.score, job.unseen, job.condition.miniature) for job in pair}) == 1
        )


def test_each_arm_of_the_stack_adds_a_method_to_the_one_before_and_has_the_same_grid():
    arms = [name for name in CONDITIONS if name.startswith("stack-")]
    rates = [next(iter(CONDITIONS[name].choices - {"long-epochs"})) for name in arms]
    assert len(set(rates)) == len(arms) == 5
    assert all(
        protocol.CHOICES[rate].conditions == [name] for rate, name in zip(rates, arms, strict=True)
    )
    choices = [
        dataclasses.replace(protocol.CHOICES[rate], what="", conditions=()) for rate in rates
    ]
    assert choices == choices[:1] * 5
    flags = [
        {"--sampling": CONDITIONS[name].sampling, **flag_values(CONDITIONS[name].run_flags(QUICK))}
        for name in arms
    ]
    added = [
        {key for key in new if new[key] != old.get(key)} for old, new in itertools.pairwise(flags)
    ]
    assert added == [
        {"--dga-steps", "--log-every-n-steps"},
        {"--sampling"},
        {"--coin-flip-mixup"},
        {"--token-drop"},
    ]


# --- runs ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for the measurements: writes the settings that were asked for, and remembers the order."""

    seen: list[str]

    def __init__(self, which: Ablation) -> None:
        self.which = which
        Recorder.seen = []

    def write(self, ended: Ended) -> dict:
        Recorder.seen.append(str(ended.job))
        run = self.which.training_run(ended.job)
        assert run.checkpoint.is_file()
        # More epochs score higher, up to a point; of learning rates, the middle one.
        score = min(100.0, 10.0 * ended.job.condition.run_epochs(self.which.choices)) + 5 * (
            "1e-3" in run.flags
        )
        rsum = {"unseen": score, ALL_UNSEEN: score, "across": None}
        record = {**self.which.asked(ended.job), "rsum": rsum, "score": score}
        self.which.record_file(ended.job).write_text(json.dumps(record))
        return record


FAILING: list[str] = []


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """An ablation whose training is a shell command that leaves the checkpoint, or fails for `vit`."""

    def start(words: list[str], ranks: int, *, log: Path, threads: int) -> TrainingProcess:
        folder = Path(flag_values(words)["--logs"][0]) / flag_values(words)["--name"][0]
        last = folder / "checkpoints" / f"epoch_{flag_values(words)['--epochs'][0]}.pt"
        work = f"mkdir -p {last.parent} && touch {last} {folder / 'out.log'}"
        fails = folder.name in FAILING
        with open(log, "ab") as file:
            command = ["sh", "-c", "echo error: no such tower >&2; exit 3" if fails else work]
            return TrainingProcess(subprocess.Popen(command, stderr=file), log)

    FAILING[:] = ["vit-seed0"]
    monkeypatch.setattr(drawn_training, "start_training", start)
    monkeypatch.setattr(run, "Measurements", Recorder)
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    return ablation_in(tmp_path)


def test_runs_come_seed_by_seed_behind_their_bases_and_are_kept(quick):
    names = ["auxiliary", "clusters", "debiased"]
    jobs = quick.plan([0, 1], names)
    assert [str(job) for job in jobs if job.seed == 0] == [
        f"{n}-seed0" for n in ("debiased", "mixed-bert", "auxiliary", "start", "clusters")
    ]
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert run.run_all(quick, jobs, 1) == {}
    order = Recorder.seen
    assert order.index("mixed-bert-seed1") < order.index("auxiliary-seed1") and len(order) == 10
    # Measured runs are kept, and their checkpoints are gone once nothing needs them.
    assert quick.plan([0, 1], names) == []
    assert not list((quick.out / "runs" / "auxiliary-seed0").rglob("*.pt"))
    assert list(
        (quick.out / "runs" / "start-seed0").rglob("*.pt")
    )  # `go-on-random` is still to come

    # Other choices, or a base of other flags, begin again; and the base is trained again, since its checkpoint is gone.
    longer = Ablation(quick.data, quick.out, {**QUICK, "epochs": "3"})
    assert [job.name for job in longer.plan([0], names)] == [
        "debiased",
        "mixed-bert",
        "auxiliary",
        "clusters",
    ]
    record = json.loads(quick.record_file(Job(0, "auxiliary")).read_text())
    changed = {**record, "built_on": {"mixed-bert": ["--lr", "5"]}}
    quick.record_file(Job(0, "auxiliary")).write_text(json.dumps(changed))
    assert [job.name for job in quick.plan([0, 1], names)] == ["mixed-bert", "auxiliary"]


def test_an_interrupted_run_begins_again(quick):
    training = quick.training_run(Job(0, "start"))
    training.folder.mkdir(parents=True)
    (training.folder / "half.pt").touch()
    assert quick.plan([0], ["start"]) == [Job(0, "start")]
    assert run.run_all(quick, [Job(0, "start")], 2) == {}
    assert not (training.folder / "half.pt").exists()
    # The clusters are still to come: their base keeps its checkpoint.
    assert training.is_finished and quick.plan([0], ["clusters"]) == [Job(0, "clusters")]


def test_a_failed_run_stops_only_those_that_are_built_on_it(quick):
    failed = run.run_all(quick, quick.plan([0], ["vit", "token-drop"]), 2)
    assert failed == {Job(0, "vit"): "the training ended with status 3: error: no such tower"}
    assert quick.is_recorded(Job(0, "token-drop")) and not quick.is_recorded(Job(0, "vit"))
    FAILING.append("mixed-bert-seed0")
    failed = run.run_all(quick, quick.plan([0], ["auxiliary"]), 1)
    assert failed[Job(0, "auxiliary")] == "mixed-bert-seed0 failed"


def test_pilots_choose_on_validation_one_after_the_other(quick, monkeypatch, tmp_path):
    """The shortest length that is nearly the best, the best rate; later pilots use the earlier choices."""
    file = tmp_path / "choices.json"
    monkeypatch.setattr(run, "CHOICES_FILE", file)
    run.choose(quick.data, tmp_path / "pilots", 2)
    rates = {name: "1e-3" for name in protocol.CHOICES if name.startswith("lr-")}
    assert read_choices(file) == {
        **protocol.FIXED,
        **rates,
        "long-epochs": "20",
        "clusters": "image-4",
    }
    # 40 epochs gained nothing over 20, so that nobody waits for 80.
    assert {folder.name for folder in (tmp_path / "pilots").glob("long-*")} == {
        "long-epochs=20",
        "long-epochs=40",
    }
    records = [
        json.loads(one.read_text()) for one in (tmp_path / "pilots" / "lr-16=5e-4").glob("*.json")
    ]
    assert {(record["seed"], record["split"]) for record in records} == {
        (seed, "val") for seed in PILOT_SEEDS
    }
    assert {flag_values(record["flags"])["--epochs"][0] for record in records} == {"16"}
    before = len(list((tmp_path / "pilots").rglob("*.json")))
    Recorder.seen = []
    run.choose(quick.data, tmp_path / "pilots", 2)  # nothing is trained again
    assert Recorder.seen == [] and len(list((tmp_path / "pilots").rglob("*.json"))) == before
    # A choice stands where its pilots are gone, and those after it are still made.
    found = json.loads(file.read_text())
    file.write_text(json.dumps({name: found[name] for name in found if name != "clusters"}))
    assert "clusters" not in read_choices(file)
    run.choose(quick.data, tmp_path / "elsewhere", 2)
    assert json.loads(file.read_text()) == found
    assert {folder.name.partition("=")[0] for folder in (tmp_path / "elsewhere").iterdir()} == {
        "clusters"
    }
    # A grid that has become longer is gone through again, for the values that have no pilot yet.
    grid = ("1e-4", *protocol.CHOICES["lr-256"].grid)
    longer = dataclasses.replace(
        protocol.CHOICES["lr-256"], grid=grid, seeds=[102], during={"epochs": "7"}
    )
    monkeypatch.setitem(protocol.CHOICES, "lr-256", longer)
    Recorder.seen = []
    run.choose(quick.data, tmp_path / "pilots", 2)
    (record,) = (
        json.loads(one.read_text()) for one in (tmp_path / "pilots" / "lr-256=1e-4").glob("*.json")
    )
    assert len(Recorder.seen) == 1
    assert (record["seed"], flag_values(record["flags"])["--epochs"]) == (102, ["7"])
    assert "1e-4" in json.loads(file.read_text())["lr-256"]["scores"]


def test_before_the_pilots_only_conditions_without_choices_are_run(
    quick, monkeypatch, tmp_path, capsys
):
    assert read_choices(tmp_path / "choices.json") == protocol.FIXED
    free = {name for name, one in CONDITIONS.items() if one.choices <= set(protocol.FIXED)}
    assert {"random", "debiased", "icons-weight-0", "auxiliary"} <= free
    assert not free & {"batch-16", "clusters", "mixup", "student-half"}  # the last by its teacher
    monkeypatch.setattr(run, "read_choices", lambda: protocol.FIXED)
    assert (
        run.main(
            ["--only", "random,student-half", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
        )
        == 2
    )
    assert (
        "1 conditions (student-half ...) depend on settings that pilots choose"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "o").exists()
    before = Ablation(quick.data, quick.out, protocol.FIXED)
    assert run.run_all(before, before.plan([0], ["debiased", "start"]), 1) == {}
    # Choices made later leave it as it is.
    after = Ablation(quick.data, quick.out, {**QUICK, **protocol.FIXED})
    assert after.is_recorded(Job(0, "debiased")) and not before.is_recorded(Job(0, "clusters"))
    (tmp_path / "choices.json").write_text(json.dumps({"epochs": {"chosen": "8"}}))
    with pytest.raises(UserError, match=r"of another protocol \(epochs\): remove it"):
        read_choices(tmp_path / "choices.json")


def test_finished_runs_of_another_machine_are_taken_over(quick, tmp_path):
    assert run.run_all(quick, quick.plan([0], ["debiased", "random"]), 1) == {}
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([json.loads(file.read_text()) for file in quick.out.glob("*.json")]))
    here = ablation_in(tmp_path, out="elsewhere")
    assert here.take_over(runs) == 2 and here.plan([0], ["debiased", "random"]) == []
    assert here.take_over(runs) == 0 == here.take_over(tmp_path / "none.json")
    assert (
        ablation_in(tmp_path, {**QUICK, "epochs": "3"}, out="other settings").take_over(runs) == 0
    )

    def taken(record: dict, **choices: str) -> int:
        runs.write_text(json.dumps([record]))
        taken.calls = getattr(taken, "calls", 0) + 1
        return ablation_in(tmp_path, {**QUICK, **choices}, out=f"out {taken.calls}").take_over(runs)

    # A setting that became a choice after the run: its flags give the value, then among the flags that all runs share.
    older = quick.asked(Job(0, "gather"))
    assert (
        older["choices"].pop("lr-64") == "1e-3" == older["flags"].pop()
        and older["flags"].pop() == "--lr"
    )
    older["flags"] = ["--lr", "1e-3", *older["flags"]]
    assert taken(older) == 1 and taken(older, **{"lr-64": "2e-3"}) == 0
    assert taken({**older, "choices": {**older["choices"], "lr-64": "2e-3"}}) == 0
    assert taken({**older, "choices": "of an earlier protocol"}) == 0
    renamed = quick.asked(Job(0, "mixup-both"))
    flags = [word for word in renamed["flags"] if word not in ("--ablate", "mixup-both")]
    for spelling, count in ((["--ablate", "mixup-both"], 1), (["--mixup-of", "both"], 1), ([], 0)):
        assert taken({**renamed, "flags": [*flags, *spelling]}) == count


def test_processes_take_no_more_slots_than_there_are(quick):
    processes = Processes(2)
    processes.start(Job(0, "gather"), quick.training_run(Job(0, "gather")))  # two ranks
    assert not processes.has_room(1)
    ended = processes.next_ended()
    assert ended.status == 0 and ended.wall_seconds > 0 and processes.has_room(2)
    assert Processes(1).has_room(2)  # two ranks on one core, alone


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only", "debiased,nosuch"], "no condition 'nosuch'"),
        (["--seeds", "one"], "--seeds takes numbers"),
        (["--seeds", "0,100"], "without the pilots' 100, 102"),
        (["--jobs", "0"], "1 or more"),
    ],
)
def test_bad_arguments_are_a_sentence(capsys, tmp_path, argv, words):
    assert run.main([*argv, "--quick", "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


# --- the sources that the ablation makes -----------------------------------------------------------------------------


def tiny_emoji(out: Path, *, pairs: int, held_out: int = 12, sources=tuple(EMOJI.sources)) -> Path:
    """Four sources in the layout of `python -m scripts.drawn emoji`: noise of 16 px, captions of one to ten words."""
    rng = np.random.default_rng(0)
    words = ["red", "green", "blue", "small", "big", "round", "cat", "dog", "house", "tree"]

    def sample(source: str, number: int, held: bool = False) -> Sample:
        png = out / "picture.png"
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(png)
        caption = " ".join(rng.permutation(words)[: 1 + number % 10])
        group = f"g{number % 7}"
        facts = {
            "concept": f"c{number}",
            "source": source,
            "group": group,
            "held_out": "test" if held else None,
        }
        files = {
            "png": png.read_bytes(),
            "txt": caption.encode(),
            "json": json.dumps(facts).encode(),
        }
        return Sample(f"{source}-c{number}", files)

    out.mkdir(parents=True)
    for i, source in enumerate(sources):
        write_source(out / source, [sample(source, 1000 + n) for n in range(pairs)], shard_size=64)
        every = [sample(source, n, n // held_out == i) for n in range(held_out * len(sources))]
        write_retrieval_set(out / "test-across" / source, every)
    write_bert(out / "bert")
    return out


def read(folder: Path) -> list[Sample]:
    return [pair for shard in sorted(folder.glob("*.tar")) for pair in read_samples(shard)]


def test_the_longer_captions_get_the_frame_and_the_swap_exchanges_it(tmp_path):
    """A.5: a half each; across the contexts every picture has the other half's frame and keeps its caption."""
    data = tiny_emoji(tmp_path / "data", pairs=40)
    sources.write_contexts(data, tmp_path / "contexts")
    halves = {context: read(tmp_path / "contexts" / context) for context in sources.CONTEXTS}
    lengths = {
        context: [len(pair.files["txt"].split()) for pair in half]
        for context, half in halves.items()
    }
    assert len(halves["long"]) == len(halves["short"]) == 20 and min(lengths["long"]) >= max(
        lengths["short"]
    )

    grey = Image.new("RGB", (16, 16), "grey")
    samples = [
        DrawnSample(grey, " ".join(["a"] * n), str(n), "twemoji", "g", n < 9) for n in range(1, 11)
    ]
    pairs = measuring.ContextPairs.of(samples, tmp_path / "contexts")
    red = context_bias.RED
    for context, frame, other in (("long", True, False), ("short", False, True)):
        assert pairs.own[context] and all(
            (s.image.getpixel((0, 0)) == red) == frame for s in pairs.own[context]
        )
        assert all((s.image.getpixel((0, 0)) == red) == other for s in pairs.other[context])
        assert [s.caption for s in pairs.own[context]] == [s.caption for s in pairs.other[context]]
    assert (
        sum(map(len, pairs.own.values())) == len(pairs.plain) == 8
    )  # pairs that are not held out are left out
    assert (
        all(sample.image.getpixel((0, 0)) != red for sample in pairs.plain)
        and grey.getpixel((0, 0)) != red
    )


def test_every_second_caption_becomes_the_name_of_its_group(tmp_path):
    data = tiny_emoji(tmp_path / "data", pairs=10, sources=("noto", "fluent"))
    sources.write_groups(
        data, {source: tmp_path / "groups" / source for source in ("noto", "fluent")}
    )
    for source in ("noto", "fluent"):
        before, after = read(data / source), read(tmp_path / "groups" / source)
        assert [pair.key for pair in after] == [pair.key for pair in before]
        assert [pair.files["png"] for pair in after] == [pair.files["png"] for pair in before]
        captions = {pair.key: pair.files["txt"].decode() for pair in after}
        groups = {pair.key: json.loads(pair.files["json"])["group"] for pair in after}
        assert [captions[key] == groups[key] for key in sorted(captions)] == [True, False] * 5
        assert all(
            captions[pair.key] in (groups[pair.key], pair.files["txt"].decode()) for pair in before
        )
    with pytest.raises(UserError, match="holds no shards"):
        sources.write_groups(data, {"mdi": tmp_path / "others"})


def test_mixtures_have_the_declared_construction(tmp_path):
    """Sources without a common concept; parts of one source by groups of pictures; one source 18 times as large."""
    data, names = tiny_emoji(tmp_path / "data", pairs=72), ["noto", "fluent", "openmoji"]

    def made(kind: str, parts: list[str]) -> list[list[dict]]:
        out = {part: tmp_path / kind / part for part in parts}
        for _ in range(2):  # a second call keeps them
            sources.write_mixture(data, kind, names, out)
        return [
            [json.loads(pair.files["json"]) for pair in read(folder)] for folder in out.values()
        ]

    apart = made("apart", names)
    concepts = [{fact["concept"] for fact in facts} for facts in apart]
    assert [{fact["source"] for fact in facts} for facts in apart] == [{name} for name in names]
    assert (
        sum(map(len, concepts)) == len(set.union(*concepts)) == 72 and min(map(len, concepts)) > 12
    )
    alike = made("alike", ["part-0", "part-1", "part-2"])
    groups = [{fact["group"] for fact in facts} for facts in alike]
    assert sum(map(len, alike)) == 72 and sum(map(len, groups)) == len(set.union(*groups)) == 7
    assert {fact["source"] for facts in alike for fact in facts} == {"noto"}
    assert [len(facts) for facts in made("large", names)] == [72, 4, 4]


def test_the_raw_probe_finds_a_style_and_no_difference_where_there_is_none():
    """Red or blue pictures with one more word in a caption are told apart; two halves of the same pairs are not."""

    def source(color: tuple[int, int, int], words: str, count: int, start: int) -> list[Sample]:
        pixels = np.random.default_rng(start).integers(0, 60, (count, 8, 8, 3), dtype=np.uint8)
        return [
            Sample(str(i), {
                "png": encoded(Image.fromarray(one + np.array(color, dtype=np.uint8))),
                "txt": f"thing {i}{words}".encode(), "json": json.dumps({"concept": str(start + i)}).encode(),
            })
            for i, one in enumerate(pixels)
        ]  # fmt: skip

    red = source((120, 0, 0), "", 60, 0)
    found = probe_mixture({"red": red, "blue": source((0, 0, 120), " icon", 180, 1000)}, seed=0)
    assert found["pictures"] == found["captions"] == 1.0 and found["chance"] == 0.5
    assert found["other_source"] == 2 * 60 * 180 / 240**2 and found["batches"] == 60 / 64
    alike = probe_mixture({"one": red, "two": source((120, 0, 0), "", 60, 1000)}, seed=0)
    assert alike["pictures"] < 0.7 and alike["captions"] < 0.7


def test_an_unseen_source_is_scored_on_all_its_pairs(tmp_path):
    data = tiny_emoji(tmp_path / "data", pairs=500)
    test = Measurements(Ablation({"emoji": data}, tmp_path / "out", QUICK)).samples("emoji")[
        "fluent"
    ]
    pools = unseen_pools(data, "fluent", test)
    pairs = [sample for pool in pools for sample in pool]
    assert [len(pool) for pool in pools] == [200, 200]  # of 500 training and 12 test pairs
    assert {sample.source for sample in pairs} == {"fluent"} and len(
        {sample.concept for sample in pairs}
    ) == 400
    held_out = {sample.concept for sample in test if sample.held_out}
    assert held_out & {sample.concept for sample in pairs} and all(
        sample.held_out for sample in pairs
    )
    again = [sample for pool in unseen_pools(data, "fluent", test) for sample in pool]
    assert [sample.concept for sample in pairs] == [sample.concept for sample in again]


@pytest.mark.slow  # ten trainings in processes of their own, a k-means and another start of `zerovl`: about a minute
def test_real_runs_are_trained_measured_and_reported(tmp_path):
    real = ablation_in(tmp_path, {**QUICK, "epochs": "1"})
    tiny_emoji(real.data["emoji"], pairs=200)
    names = [
        "contexts-debiased",
        "gather",
        "clusters",
        "auxiliary",
        "student-half",
        "repeated",
        "repeated-positives",
    ]
    assert run.run_all(real, real.plan([0], names), 2) == {}
    records = rows.read_records(real.out)
    for name in names:
        found = records[name][0]
        assert all(0 <= value <= 600 for value in found["rsum"].values() if value is not None)
        assert found["loss_curve"] and found["cpu_seconds"] > 1 and 0 <= found["probe_images"] <= 1
        score = CONDITIONS[name].score
        assert found["score"] == found["rsum"][ALL_UNSEEN if score == "unseen" else score]
    # A model can recognise the source by the frame: noise pictures have only it in common.
    assert records["contexts-debiased"][0]["probe_chance"] == 0.5
    assert 0 <= records["clusters"][0]["shared_information"] <= 1
    assert len(records["auxiliary"][0]["score_by_epoch"]) == 1
    assert (
        "noto=" not in " ".join(records["gather"][0]["flags"])
        and records["gather"][0]["unseen"] == "noto"
    )
    assert real.plan([0], names) == []
    report.write_rows(records, tmp_path / "rows")
    assert "too few seeds" in (tmp_path / "rows" / "rows.csv").read_text()
