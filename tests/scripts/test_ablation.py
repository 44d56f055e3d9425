"""`make ablation`: flags, what is kept, order and failures of runs, choices, the rule of the verdicts, the page."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.launch import TrainingProcess
from open_clip_zerovl.shards.members import Sample, read_samples
from open_clip_zerovl.shards.writing import write_retrieval_set, write_source
from scripts import demo
from scripts.ablation import measuring, protocol, run
from scripts.ablation import report as ablation_report
from scripts.ablation import sources as ablation_sources
from scripts.ablation.jobs import Ablation, Job
from scripts.ablation.measuring import Ended, Measurements, thinned, unseen_pools
from scripts.ablation.protocol import ALL_UNSEEN, CONDITIONS, MINIATURES, PILOT_SEEDS, QUICK, TABLES, read_choices
from scripts.ablation.report import Row
from scripts.ablation.run import Processes
from scripts.ablation.verdicts import (
    CONTRADICTED,
    NEAR_CHANCE,
    NO_DIFFERENCE,
    NOT_RUN,
    REPRODUCED,
    TOO_FEW,
    UNDECIDED,
    estimate,
    holm,
    judge,
    over_seeds,
)
from scripts.drawn import training as drawn_training
from scripts.drawn.emoji import EMOJI
from scripts.drawn.make import DrawnSample
from scripts.drawn.training import TrainingRun, drawn_flags, flag_values, grouped, read_loss_curve
from scripts.paper import context_bias
from support import ROOT
from support.tiny_clip import write_bert
from training.params import parse

# --- flags -----------------------------------------------------------------------------------------------------------


def test_flags_replace_those_of_the_same_name_and_keep_the_others(tmp_path):
    def flags(*more: str) -> list[str]:
        return drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)

    base, more = flags(), ["--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--lr=2e-3"]
    changed = {**flag_values(base), "--aug-cfg": ["scale=(0.6,1.0)"], "--coin-flip-mixup": [], "--lr": ["2e-3"]}
    assert flag_values(flags(*more)) == changed and flags(*more)[-2:] == ["--lr", "2e-3"]
    assert len(flags(*more)) == len(set(flag_values(flags(*more)))) + sum(map(len, changed.values()))
    assert "--warmup-share" not in flags("--warmup", "5")
    # A flag that may come twice comes twice.
    assert flags("--freeze", "text", "--freeze", "image")[-4:] == ["--freeze", "text", "--freeze", "image"]
    with pytest.raises(UserError, match="begin with --.*'0.2'"):
        flags("0.2")


def test_the_demo_takes_training_flags_but_not_what_it_compares():
    settings = demo.Settings(Path("data"), Path("out"), 3, 7, "val", ("--lr", "5e-4", "--epochs", "5"))
    demo.check_flags(settings.flags)
    for own in ("--sampling", "--train-data=x", "--name"):
        with pytest.raises(UserError, match=r"the demo sets --\S+ itself: .*; leave it out"):
            demo.check_flags(["--coin-flip-mixup", own, "x"])
    flags = flag_values(settings.run_of("random").flags)
    assert [flags[f"--{name}"] for name in ("lr", "epochs", "seed", "sampling")] == [["5e-4"], ["5"], ["7"], ["random"]]


def test_the_demo_says_when_both_models_are_at_chance():
    def words(*scores: float) -> str:
        sides = {name: {"value": score} for name, score in zip(demo.SAMPLINGS, scores, strict=True)}
        return demo.judgement({"measures": {"within": {"sides": sides}}}, 2)

    assert "At chance: RSUM within a source is 19 (random) and 18 (debiased), a random order has 16." in words(
        19.2, 18.4
    )
    assert "At chance" not in words(19.0, 33.0)


def test_a_run_of_other_flags_is_not_taken_for_finished(tmp_path):
    def of(*more: str) -> TrainingRun:
        flags = drawn_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)
        return TrainingRun(tmp_path / "runs" / "random", tuple(flags))

    done = of()
    done.checkpoint.parent.mkdir(parents=True)
    done.checkpoint.touch()
    assert not done.is_finished  # nobody knows of which flags it is
    done.asked.write_text(json.dumps({"flags": list(done.flags), "ranks": 1}))
    assert done.is_finished and of().is_finished
    assert not of("--text-augment", "0.2").is_finished
    assert not TrainingRun(done.folder, done.flags, ranks=2).is_finished


def test_a_training_log_of_open_clip_is_read(tmp_path):
    """The total "Loss", not a part of it; a step repeated after a resume counts once, as it was last; nan is kept."""
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


def test_the_log_format_is_the_one_that_open_clip_writes():
    """open_clip_train formats the line inside its loop, so its source is what can be held against."""
    train = pytest.importorskip("open_clip_train.train")
    source = Path(train.__file__).read_text(encoding="utf-8")
    assert 'f"Train Epoch: {epoch} [{num_samples:>{sample_digits}}/{samples_per_epoch} ' in source
    # 3.3: "{loss_name.capitalize()}: {loss_m.val:#.5g} ({loss_m.avg:#.5g})"; 4 breaks the same line after the value
    assert re.search(r'\{(loss_)?name\.capitalize\(\)\}: \{(loss_)?m\.val:#\.5g\} ("\s+f")?\(\{', source)


def ablation_in(folder: Path, choices=QUICK, split: str = "test") -> Ablation:
    return Ablation({name: folder / "data" / name for name in MINIATURES}, folder / "out", choices, split)


@pytest.mark.parametrize("name", CONDITIONS)
def test_open_clips_parser_takes_every_condition(name, tmp_path):
    job = Job(1, name)
    training = ablation_in(tmp_path).training_run(job)
    args, config = parse([*training.flags, "--logs", "x", "--name", "y"])
    condition = CONDITIONS[name]
    # Nothing differs from the demo's flags but what the condition names.
    assert args.epochs == condition.run_epochs(QUICK) and args.seed == 1 and config.sampling == condition.sampling
    data = tmp_path / "data" / condition.miniature
    plain = drawn_flags(data, sampling=condition.sampling, epochs=args.epochs, seed=1, sources=job.trained)
    flags = condition.run_flags(QUICK)
    named = {*flag_values(flags), "--init-from", "--save-frequency"}
    named |= {"--train-data"} if condition.kind != "plain" else set()
    named |= {"--teacher"} if condition.teacher else set()
    ours, theirs = ([group for group in grouped(f) if group[0] not in named] for f in (training.flags, plain))
    assert ours == theirs and not any("{" in flag for flag in training.flags)
    assert ("--init-from" in training.flags) == (condition.init_from is not None)


def test_a_run_is_scored_in_the_source_that_it_does_not_see():
    """Eight seeds leave each of four sources out twice, and the pilots are others."""
    for name in ("debiased", "icons-debiased", "clusters", "one-random"):
        sources = [*MINIATURES[CONDITIONS[name].miniature].sources]
        jobs = [Job(seed, name) for seed in protocol.SEEDS]
        assert [job.unseen for job in jobs] == [*sources, *sources]
        assert all(job.unseen not in job.trained for job in jobs)
        assert {len(job.trained) for job in jobs} == {1 if name == "one-random" else 3}
    assert Job(0, "last-noto").unseen is None and len(Job(0, "last-noto").trained) == 4
    assert not set(PILOT_SEEDS) & set(protocol.SEEDS)


def test_the_tables_name_conditions_that_are_there_and_use_all():
    used = {name for table in TABLES for name in table.conditions}
    assert set(CONDITIONS) - used == {needs for one in CONDITIONS.values() for needs in one.needs} - used
    assert all(needs in CONDITIONS for one in CONDITIONS.values() for needs in one.needs)
    for table in TABLES:
        for one in table.comparisons:
            assert {one.run, one.against} <= set(CONDITIONS)
            # The claim is that of the paper's own numbers.
            if one.paper and one.claim in ("higher", "lower"):
                signs = {(a > b) == (one.claim == "higher") for a, b in zip(*one.paper, strict=True)}
                assert signs == {True}
            # Two conditions that are compared are scored by the same number, on the same source.
            pair = [Job(3, name) for name in (one.run, one.against)]
            assert len({(job.condition.score, job.unseen, job.condition.miniature) for job in pair}) == 1


# --- runs ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for the measurements: writes what was asked, and remembers the order."""

    seen: list[str]

    def __init__(self, which: Ablation) -> None:
        self.which = which
        Recorder.seen = []

    def write(self, ended: Ended) -> dict:
        Recorder.seen.append(str(ended.job))
        assert self.which.training_run(ended.job).checkpoint.is_file()
        # More epochs score higher, up to a point; of learning rates, the middle one.
        score = min(100.0, 10.0 * ended.job.condition.run_epochs(self.which.choices)) + 5 * (
            "1e-3" in self.which.training_run(ended.job).flags
        )
        record = {
            **self.which.asked(ended.job),
            "rsum": {"unseen": score, ALL_UNSEEN: score, "across": None},
            "score": score,
        }
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


def test_runs_come_seed_by_seed_behind_what_they_are_built_on_and_are_kept(quick):
    names = ["auxiliary", "clusters", "debiased"]
    jobs = quick.plan([0, 1], names)
    assert [str(job) for job in jobs if job.seed == 0] == [
        f"{n}-seed0" for n in ("debiased", "mixed-bert", "auxiliary", "start", "clusters")
    ]
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert run.run_all(quick, jobs, 1) == {}
    order = Recorder.seen
    assert order.index("mixed-bert-seed1") < order.index("auxiliary-seed1") and len(order) == 10
    # What was measured is kept, and its checkpoints are gone once nothing is to be built on them.
    assert quick.plan([0, 1], names) == []
    assert not list((quick.out / "runs" / "auxiliary-seed0").rglob("*.pt"))
    assert list((quick.out / "runs" / "start-seed0").rglob("*.pt"))  # `go-on-random` is still to come

    # Other choices, or a base of other flags, begin again; and the base is trained again, since its checkpoint is gone.
    longer = Ablation(quick.data, quick.out, {**QUICK, "epochs": "3"})
    assert [job.name for job in longer.plan([0], names)] == ["debiased", "mixed-bert", "auxiliary", "clusters"]
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


def test_a_run_that_fails_is_told_and_stops_only_what_is_built_on_it(quick):
    failed = run.run_all(quick, quick.plan([0], ["vit", "token-drop"]), 2)
    assert failed == {Job(0, "vit"): "the training ended with status 3: error: no such tower"}
    assert quick.is_recorded(Job(0, "token-drop")) and not quick.is_recorded(Job(0, "vit"))
    FAILING.append("mixed-bert-seed0")
    failed = run.run_all(quick, quick.plan([0], ["auxiliary"]), 1)
    assert failed[Job(0, "auxiliary")] == "mixed-bert-seed0 failed"


def test_a_sitting_ends_in_time_and_the_next_goes_on(quick):
    jobs = quick.plan([0], ["debiased", "random"])
    with pytest.raises(run.OutOfTime, match="2 of 2 runs are left; call it again to go on"):
        run.run_all(quick, jobs, 1, ends_at=0.0)
    assert run.run_all(quick, quick.plan([0], ["debiased", "random"]), 1, ends_at=math.inf) == {}


def test_pilots_choose_on_validation_one_after_the_other(quick, monkeypatch, tmp_path):
    """Of lengths the shortest that is nearly the best, of rates the best; later pilots use the earlier choices."""
    monkeypatch.setattr(run, "CHOICES_FILE", tmp_path / "choices.json")
    run.choose(quick.data, tmp_path / "pilots", 2, None)
    chosen = read_choices(tmp_path / "choices.json")
    assert chosen == {
        **protocol.FIXED, "lr-16": "1e-3", "lr-64": "1e-3", "lr-256": "1e-3", "lr-detached": "1e-3",
        "clusters": "image-4", "long-epochs": "20",
    }  # fmt: skip
    # 40 epochs gained nothing over 20, so that nobody waits for 80.
    assert {folder.name for folder in (tmp_path / "pilots").glob("long-epochs=*")} == {
        "long-epochs=20",
        "long-epochs=40",
    }
    records = [json.loads(file.read_text()) for file in (tmp_path / "pilots" / "lr-16=5e-4").glob("*.json")]
    assert {record["seed"] for record in records} == set(PILOT_SEEDS)
    assert {record["split"] for record in records} == {"val"}
    assert {flag_values(record["flags"])["--epochs"][0] for record in records} == {"16"}
    before = len(list((tmp_path / "pilots").rglob("*.json")))
    Recorder.seen = []
    run.choose(quick.data, tmp_path / "pilots", 2, None)  # nothing is trained again
    assert Recorder.seen == [] and len(list((tmp_path / "pilots").rglob("*.json"))) == before
    # A choice that was made stands where its pilots are gone, and those after it are still made.
    found = json.loads((tmp_path / "choices.json").read_text())
    kept = {name: found[name] for name in found if name != "clusters"}
    (tmp_path / "choices.json").write_text(json.dumps(kept))
    assert "clusters" not in read_choices(tmp_path / "choices.json")
    run.choose(quick.data, tmp_path / "elsewhere", 2, None)
    assert json.loads((tmp_path / "choices.json").read_text()) == found
    assert {folder.name.partition("=")[0] for folder in (tmp_path / "elsewhere").iterdir()} == {"clusters"}
    # A grid that has become longer is gone through again, for the values that have no pilot yet.
    longer = dataclasses.replace(protocol.CHOICES["lr-256"], grid=("1e-4", *protocol.CHOICES["lr-256"].grid))
    monkeypatch.setitem(protocol.CHOICES, "lr-256", longer)
    Recorder.seen = []
    run.choose(quick.data, tmp_path / "pilots", 2, None)
    assert len(Recorder.seen) == len(PILOT_SEEDS)
    assert "1e-4" in json.loads((tmp_path / "choices.json").read_text())["lr-256"]["scores"]


def test_before_the_pilots_only_what_depends_on_none_is_run(quick, monkeypatch, tmp_path, capsys):
    assert read_choices(tmp_path / "choices.json") == protocol.FIXED
    free = {name for name, one in CONDITIONS.items() if one.choices <= set(protocol.FIXED)}
    assert {"random", "debiased", "icons-weight-0", "auxiliary"} <= free
    assert not free & {"batch-16", "clusters", "mixup", "student-half"}  # the last by its teacher
    monkeypatch.setattr(run, "read_choices", lambda: protocol.FIXED)
    assert run.main(["--only", "random,student-half", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "1 conditions (student-half ...) depend on settings that pilots choose" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    before = Ablation(quick.data, quick.out, protocol.FIXED)
    assert run.run_all(before, before.plan([0], ["debiased", "start"]), 1) == {}
    # Choices made later leave it as it is.
    after = Ablation(quick.data, quick.out, {**QUICK, **protocol.FIXED})
    assert after.is_recorded(Job(0, "debiased")) and not before.is_recorded(Job(0, "clusters"))


def test_finished_runs_of_another_machine_are_taken_over(quick, tmp_path):
    assert run.run_all(quick, quick.plan([0], ["debiased", "random"]), 1) == {}
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([json.loads(file.read_text()) for file in quick.out.glob("*.json")]))
    here = Ablation(quick.data, tmp_path / "elsewhere", QUICK)
    assert here.take_over(runs) == 2 and here.plan([0], ["debiased", "random"]) == []
    assert here.take_over(runs) == 0 == here.take_over(tmp_path / "none.json")
    # Negative control: runs with other settings are not.
    assert Ablation(quick.data, tmp_path / "third", {**QUICK, "epochs": "3"}).take_over(runs) == 0
    # A setting that became a choice after the run: its flags say the value.
    older = quick.asked(Job(0, "gather"))
    assert older["choices"].pop("lr-64") == "1e-3" == older["flags"].pop() and older["flags"].pop() == "--lr"
    older["flags"] = ["--lr", "1e-3", *older["flags"]]  # then among the flags that all runs share
    runs.write_text(json.dumps([older]))
    assert Ablation(quick.data, tmp_path / "fourth", QUICK).take_over(runs) == 1
    assert Ablation(quick.data, tmp_path / "fifth", {**QUICK, "lr-64": "2e-3"}).take_over(runs) == 0
    renamed = quick.asked(Job(0, "mixup-both"))
    for spelling in (["--ablate", "mixup-both"], ["--mixup-of", "both"]):
        flags = [word for word in renamed["flags"] if word not in ("--mixup-of", "both", "--ablate", "mixup-both")]
        runs.write_text(json.dumps([{**renamed, "flags": [*flags, *spelling]}]))
        assert Ablation(quick.data, tmp_path / spelling[0], QUICK).take_over(runs) == 1
    runs.write_text(json.dumps([{**renamed, "flags": flags}]))
    assert Ablation(quick.data, tmp_path / "neither", QUICK).take_over(runs) == 0
    for other in ({**older["choices"], "lr-64": "2e-3"}, "of an earlier protocol"):
        runs.write_text(json.dumps([{**older, "choices": other}]))
        assert Ablation(quick.data, tmp_path / "sixth", QUICK).take_over(runs) == 0


def test_choices_of_another_protocol_are_a_sentence(tmp_path):
    (tmp_path / "choices.json").write_text(json.dumps({"epochs": {"chosen": "8"}}))
    with pytest.raises(UserError, match=r"of another protocol \(epochs\): remove it"):
        read_choices(tmp_path / "choices.json")


def test_processes_take_no_more_slots_than_there_are(quick):
    processes = Processes(2)
    processes.start(Job(0, "gather"), quick.training_run(Job(0, "gather")))  # two ranks
    assert not processes.has_room(1)
    ended = processes.next_ended()
    assert ended.status == 0 and ended.wall_seconds > 0 and processes.has_room(2)
    assert Processes(1).has_room(2)  # two ranks on one core, alone


def test_bad_arguments_are_a_sentence(capsys, tmp_path):
    for argv, words in (
        (["--only", "debiased,nosuch"], "no condition 'nosuch'"),
        (["--seeds", "one"], "--seeds takes numbers"),
        (["--seeds", "0,100"], "without the pilots' 100, 102"),
        (["--jobs", "0"], "1 or more"),
    ):
        assert run.main([*argv, "--quick", "--out", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_a_curve_is_thinned_by_means():
    curve = [(64 * i, float(i)) for i in range(1, 11)]
    assert thinned(curve, 5) == [(64 * i, i - 0.5) for i in (2, 4, 6, 8, 10)]
    assert thinned(curve) == curve


# --- two contexts ----------------------------------------------------------------------------------------------------


def test_the_longer_captions_get_the_frame_and_the_swap_exchanges_it(tmp_path):
    """A.5: a half each; across the contexts every picture has the other half's frame and keeps its caption."""
    data = tiny_emoji(tmp_path / "data", pairs=40)
    ablation_sources.write_contexts(data, tmp_path / "contexts")

    def read(context: str) -> list[Sample]:
        return [
            pair for shard in sorted((tmp_path / "contexts" / context).glob("*.tar")) for pair in read_samples(shard)
        ]

    halves = {context: read(context) for context in ablation_sources.CONTEXTS}
    lengths = {context: [len(pair.files["txt"].split()) for pair in half] for context, half in halves.items()}
    assert len(halves["long"]) == len(halves["short"]) == 20 and min(lengths["long"]) >= max(lengths["short"])

    grey = Image.new("RGB", (16, 16), "grey")
    samples = [DrawnSample(grey, " ".join(["a"] * n), str(n), "twemoji", "g", n < 9) for n in range(1, 11)]
    pairs = measuring.ContextPairs.of(samples, tmp_path / "contexts")
    red = context_bias.RED
    for context, frame, other in (("long", True, False), ("short", False, True)):
        assert pairs.own[context] and all((s.image.getpixel((0, 0)) == red) == frame for s in pairs.own[context])
        assert all((s.image.getpixel((0, 0)) == red) == other for s in pairs.other[context])
        assert [s.caption for s in pairs.own[context]] == [s.caption for s in pairs.other[context]]
    assert sum(map(len, pairs.own.values())) == len(pairs.plain) == 8  # what is not held out is left out
    assert all(sample.image.getpixel((0, 0)) != red for sample in pairs.plain)
    assert grey.getpixel((0, 0)) != red


# --- the verdicts ----------------------------------------------------------------------------------------------------


def test_the_interval_is_students():
    """Differences 1 to 5: mean 3, standard deviation 1.5811, t(0.975, 4) = 2.7764, so 3 -/+ 1.9632 (any table of t)."""
    found = over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, round(found.low, 4), round(found.high, 4)) == (3.0, 1.0368, 4.9632)
    one = over_seeds([7.0])
    assert (one.mean, one.low, one.high) == (7.0, -math.inf, math.inf)


def test_p_is_that_of_scipys_paired_test_and_nan_with_one_pair():
    differences = dict(enumerate([1.0, -2.0, 3.0, 4.0, 5.0]))
    assert estimate(differences).p == pytest.approx(stats.ttest_1samp([*differences.values()], 0.0).pvalue, rel=1e-12)
    # Over sources: mean 7 over an error of sqrt(5/2 + 5/2) / 2 is t = 6.261 with 2 degrees of freedom.
    found = estimate({0: 1.0, 1: 3.0, 2: 10.0, 3: 14.0}, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert found.by_source and found.p == pytest.approx(2 * stats.t.sf(7 / (math.sqrt(5) / 2), 2), rel=1e-12)
    assert math.isnan(estimate({0: 7.0}).p)
    assert estimate({0: 2.0, 1: 2.0}).p == 0.0 and estimate({0: 0.0, 1: 0.0}).p == 1.0


def test_holms_correction_stops_at_the_first_row_that_fails():
    """Of four at 5 %: 0.012 against 0.0125, 0.013 against 0.0167, 0.03 against 0.025; what comes after is not looked at."""
    assert holm({"a": 0.03, "b": 0.012, "c": 0.04, "d": 0.013}) == {"b", "d"}
    assert holm({"a": 0.0126, "b": 0.013, "c": 0.013, "d": 0.013}) == set()
    assert holm({}) == set()


def test_the_interval_over_sources_leaves_their_differences_out():
    """Means 2 and 12; squares within 2 + 8 = 10 over 2 degrees of freedom; sqrt(5/2 + 5/2) / 2 times t(0.975, 2) = 4.3027."""
    found = estimate({0: 1.0, 1: 3.0, 2: 10.0, 3: 14.0}, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert (found.mean, round(found.low, 4), round(found.high, 4), found.by_source) == (7.0, 2.1895, 11.8105, True)
    assert not estimate({0: 1.0, 1: 3.0, 2: 10.0}, {0: "a", 1: "a", 2: "b"}).by_source
    assert not estimate({0: 1.0, 1: 3.0}, {0: "a", 1: "a"}).by_source


def test_each_source_twice_decides_what_its_difference_from_others_would_hide():
    differences = [-28.0, 6.0, 20.0, 54.0, -24.0, 10.0, 24.0, 58.0]  # seed and seed + 4 leave out the same source
    against = dict.fromkeys(range(8), 100.0)
    ours = {seed: 100 + difference for seed, difference in enumerate(differences)}
    alone = judge("higher", ours, against, 10.0)
    assert alone.verdict == UNDECIDED and not alone.by_source
    sources = {seed: f"source {seed % 4}" for seed in range(8)}
    result = judge("higher", ours, against, 10.0, sources)
    assert (result.verdict, result.by_source, result.mean, result.run) == (REPRODUCED, True, 15.0, 115.0)
    assert (result.by_seeds, alone.by_seeds) == (UNDECIDED, UNDECIDED)
    # Until the last source has its second seed, the wider interval stands.
    assert judge("higher", {seed: ours[seed] for seed in range(7)}, against, 10.0, sources) == judge(
        "higher", {seed: ours[seed] for seed in range(7)}, against, 10.0
    )


@pytest.mark.parametrize(
    ("claim", "differences", "verdict"),
    [
        ("higher", (20, 22, 21, 19, 23), REPRODUCED),
        ("lower", (20, 22, 21, 19, 23), CONTRADICTED),
        ("different", (20, 22, 21, 19, 23), REPRODUCED),
        ("same", (20, 22, 21, 19, 23), CONTRADICTED),
        ("higher", (-20, -22, -21, -19, -23), CONTRADICTED),
        ("lower", (-20, -22, -21, -19, -23), REPRODUCED),
        # A wide interval is no evidence of sameness.
        ("same", (30, -28, 5, -12, 9), UNDECIDED),
        ("higher", (30, -28, 5, -12, 9), UNDECIDED),
        # A small difference counts as none, even where it is sure.
        ("same", (3, 2, 4, 3, 2), REPRODUCED),
        ("higher", (3, 2, 4, 3, 2), NO_DIFFERENCE),
        # Beyond zero, not beyond the margin: a difference, but no contradiction of "the same".
        ("same", (9, 14, 12, 8, 13), UNDECIDED),
        ("higher", (9, 14, 12, 8, 13), REPRODUCED),
        ("higher", (20, 22, 21, 19), TOO_FEW),
        ("same", (), NOT_RUN),
    ],
)
def test_the_rule(claim, differences, verdict):
    against = {seed: 50.0 * seed for seed in range(len(differences))}  # the spread over seeds does not matter, pairs do
    ours = {seed: against[seed] + difference for seed, difference in enumerate(differences)}
    assert judge(claim, ours, against, 10.0).verdict == verdict


def test_near_chance_a_small_difference_decides_nothing():
    ours, against = {seed: 20.0 + seed for seed in range(5)}, dict.fromkeys(range(5), 19.0)
    assert judge("higher", ours, against, 10.0).verdict == NO_DIFFERENCE
    assert judge("higher", ours, against, 10.0, floor=36.0).verdict == NEAR_CHANCE
    assert judge("higher", ours, against, 10.0, floor=21.9).verdict == NO_DIFFERENCE
    assert judge("higher", {0: 20.0}, {0: 19.0}, 10.0, floor=36.0).verdict == TOO_FEW


def test_only_seeds_that_both_have_are_compared():
    result = judge("higher", {0: 10.0, 1: 12.0, 2: 500.0}, {0: 5.0, 1: 5.0, 7: -500.0}, 10.0)
    assert (result.seeds, result.run, result.against, result.mean) == (2, 11, 5, 6)


def record(name: str, seed: int, **change) -> dict:
    """A record as the runner writes it; debiased sampling gains 50, to a little more or less by seed."""
    condition = CONDITIONS[name]
    score = 150.0 + 20 * seed + (0 if "random" in name else 50 + seed)
    epochs = condition.run_epochs(QUICK)
    return {
        "condition": name, "seed": seed, "unseen": Job(seed, name).unseen, "split": "test", "ranks": 1,
        "choices": {name: QUICK[name] for name in condition.choices},
        "flags": ["--sampling", condition.sampling, "--epochs", str(epochs), *condition.run_flags(QUICK)], "built_on": {},
        "score": score, "epochs": epochs, "samples": 128, "loss_curve": [[64, 5.0], [128, 4.0]],
        "rsum": {"within": 200.0 + seed, "across": None, "mixed": 150.0, condition.score: score},
        "probe_images": 0.63, "probe_texts": 0.9, "probe_chance": 0.25, "log_p_same_source": -20.0,
        "log_p_other_source": -25.0, "started": "2026-11-22T05:00:00+00:00", "wall_seconds": 9.0, "cpu_seconds": 36.0,
        **({"score_by_epoch": [score * (i + 1) / epochs for i in range(epochs)]} if condition.every_epoch else {}),
        **({"shared_information": 0.5} if condition.kind == "clusters" else {}),
        **change,
    }  # fmt: skip


def write_records(folder: Path, names, seeds, **change) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for seed in seeds:
            (folder / f"{name}-seed{seed}.json").write_text(json.dumps(record(name, seed, **change)))
    return folder


def write_scores(folder: Path, name: str, scores, key: str = "unseen") -> Path:
    """Records of seeds 0, 1, ... with these RSUMs among those of `record`."""
    for seed, score in enumerate(scores):
        rsum = {**record(name, seed)["rsum"], key: score}
        write_records(folder, (name,), (seed,), rsum=rsum, **({"score": score} if key == ALL_UNSEEN else {}))
    return folder


def page_of(runs: Path) -> str:
    page = runs.parent / "page" / "results.md"
    ablation_report.write_page(ablation_report.read_records(runs), page)
    return page.read_text()


def line_of(text: str, beginning: str) -> str:
    return next((line for line in text.splitlines() if line.startswith(beginning)), "")


def test_the_page_has_every_table_its_numbers_and_a_figure_and_is_made_again_from_its_own_records(tmp_path, capsys):
    runs = write_records(tmp_path / "runs", CONDITIONS, range(5))
    page = tmp_path / "docs" / "results.md"
    assert ablation_report.main(["--runs", str(runs), "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    text = page.read_text()
    for table in TABLES:
        assert f"## {table.name}: {table.title}" in text
    pictures = [page.parent / line[line.index("(") + 1 : -1] for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == len(TABLES) + 1 == len(set(pictures))
    assert all(Image.open(one).size[0] > 500 for one in pictures)

    # By hand: differences 50 to 54, mean 52, sd 1.5811, half an interval 1.9632.
    row = line_of(text, "| Table 3 | Debiased sampling (*debiased*")
    assert "190.0 -> 242.0: +52.0 (+50.0 to +54.0)" in row
    assert "COCO 371.6 -> 392.3 (+20.7), F30K 483.3 -> 510.1 (+26.8)" in row
    assert [cell.strip() for cell in row.split("|")][4:6] == ["< 0.001", "5"] and REPRODUCED in row and row in printed
    same = line_of(text, "| Table 5 | DGA 2 x 32")
    assert "+0.0 (+0.0 to +0.0)" in same and REPRODUCED in same
    shown, alike = line_of(text, "- **Higher"), line_of(text, "- **No difference of 10 RSUM")
    assert "debiased sampling over random, emoji\u2020 +52.0 (+50.0 to +54.0), held-out pairs; " in shown
    assert "TokenDrop" not in shown and "TokenDrop +0.0 (+0.0 to +0.0)" in alike
    none = "within +0.0 (+0.0 to +0.0), mixed +0.0 (+0.0 to +0.0)"
    trained = f"emoji: {none}; emoji, long: {none}; icons: within "
    assert f"- **On the trained sources, debiased sampling over random**: {trained}" in text
    assert "NMI with the sources 0.50 (0.50-0.50)" in text and "240 -> 110 GPU h (x 0.46)" in text
    assert str(tmp_path) not in text and "Not finished" not in text

    again = tmp_path / "again" / "results.md"
    ablation_report.write_page(ablation_report.read_records(page.parent / "results" / "runs.json"), again)
    assert again.read_text() == text


def test_the_committed_page_is_that_of_its_runs(tmp_path):
    """docs/results.md is what its runs.json makes: nothing was changed by hand, or after it was made."""
    page = ROOT / "docs" / "results.md"
    (tmp_path / "results").mkdir()
    shutil.copy(page.with_suffix("") / "replay.json", tmp_path / "results")
    ablation_report.write_page(
        ablation_report.read_records(page.with_suffix("") / "runs.json"), tmp_path / "results.md"
    )
    assert (tmp_path / "results.md").read_text() == page.read_text()


def test_a_few_runs_make_a_page_of_what_was_begun(tmp_path):
    """Two seeds of the emoji; each unseen source and the trained ones are shown; then a guess, only where a row failed."""
    runs = write_records(tmp_path / "runs", ("random", "debiased"), (0,))
    text = page_of(runs)
    assert "Not finished" in text and TOO_FEW in text
    assert "- **Fewer than 5 seeds**: debiased sampling over random, emoji +50.0, held-out pairs.\n" in text
    assert "- **Undecided" not in text and "**On the trained sources" not in text
    assert "Not run yet: Table 3, icons-debiased against icons-random; " in text
    assert "## Table 3: Debiased sampling\n" in text and "## Table 5" not in text  # sections of what was begun

    text = page_of(write_records(runs, ("random", "debiased"), range(5)))
    # Seeds 0 and 4 leave noto out: differences 50 and 54. All pools are the same in both, so that nothing differs there.
    by_source = "fluent +53.0 (1), noto +52.0 (2), openmoji +52.0 (1), twemoji +51.0 (1)"
    # Means 51, 52, 52, 53: sd 0.8165, t(0.975, 3) = 3.1824, so 52 -/+ 1.2992.
    assert f"\n    - by unseen source: {by_source}; four sources as a sample: +50.7 to +53.3\n" in text
    assert "\n    - on the trained sources: within +0.0 (+0.0 to +0.0), mixed +0.0 (+0.0 to +0.0)\n" in text
    assert "![What debiased sampling changes](results/debiasing.png)" in text

    # A mean alone says more than is known of an undecided row.
    text = page_of(write_scores(runs, "debiased", (0.0, 400.0, 0.0, 400.0, 200.0)))
    short = text[: text.index("## How to read it")]
    assert "- **Undecided (numbers in the table below)**: debiased sampling over random, emoji.\n" in short
    assert short.count("debiased sampling over random, emoji") == 1


def test_a_guess_at_the_reason_is_shown_only_where_a_row_failed(tmp_path, monkeypatch):
    guessed = dataclasses.replace(TABLES[0].comparisons[0], guess="too short a run.")
    monkeypatch.setattr(ablation_report, "TABLES", [dataclasses.replace(TABLES[0], comparisons=(guessed,))])
    monkeypatch.setattr(ablation_report, "debiasing_rows", lambda rows: {})
    runs = write_records(tmp_path / "runs", ("debiased", "random"), range(5))
    assert "too short" not in page_of(runs)
    failed = page_of(write_scores(runs, "debiased", [10.0] * 5))
    assert CONTRADICTED in failed and "\n    - a guess at the reason: too short a run.\n" in failed


def test_the_cost_of_a_score_counts_the_epochs_until_it_is_reached(tmp_path):
    table = next(table for table in TABLES if table.name == "Table 8")
    comparison = next(one for one in table.comparisons if one.measure == "reach")

    def row() -> Row:
        return Row.of(ablation_report.read_records(tmp_path), table, comparison)

    whole = {"score": 100.0, "cpu_seconds": 50.0, "epochs": 4}
    write_records(tmp_path, ("vit",), range(5), score_by_epoch=[60.0, 80.0, 90.0, 100.0], **whole)
    # Reached in the second of four epochs, of 30 CPU seconds in all: 15 of 50.
    reached = {"score_by_epoch": [60.0, 100.0, 90.0, 95.0], "epochs": 4, "cpu_seconds": 30.0}
    write_records(tmp_path, ("auxiliary",), range(5), **reached)
    assert round(math.exp(row().verdict.mean), 6) == 0.3 and row().verdict.verdict == REPRODUCED
    # The whole run, too, is charged until it first reaches its score: 15 of 37.5.
    write_records(tmp_path, ("vit",), range(5), score_by_epoch=[60.0, 80.0, 110.0, 100.0], **whole)
    assert round(math.exp(row().verdict.mean), 6) == 0.4
    write_records(tmp_path, ("auxiliary",), (4,), score_by_epoch=[60.0, 70.0, 90.0, 95.0], epochs=4)
    assert row().verdict.verdict == UNDECIDED and row().here == "the score is reached in 4 of 5 seeds"


def test_eight_seeds_are_over_the_sources_and_marked_everywhere(tmp_path):
    """Sources differ by more than seeds of one source, so that Student's interval over the eight seeds decides nothing."""
    gains = (-20.0, 6.0, 20.0, 46.0)
    for seed in range(8):
        for name in ("random", "debiased"):
            score = 100.0 + (gains[seed % 4] + seed // 4 if name == "debiased" else 0.0)
            rsum = {**record(name, seed)["rsum"], "unseen": score, "within": score}
            write_records(tmp_path / "runs", (name,), (seed,), rsum=rsum)
    text = page_of(tmp_path / "runs")
    # Means over the two seeds -19.5, 6.5, 20.5, 46.5; squares within 4 * 0.5 over 4; t(0.975, 4) = 2.7764 times 0.25.
    words = "+13.5 (+12.8 to +14.2)*"
    assert f"emoji\u2020 {words}, over the seeds undecided, held-out pairs." in text
    assert f"- **On the trained sources, debiased sampling over random**: emoji: within {words}, mixed " in text
    assert "; four sources as a sample: -30.3 to +57.3; over the seeds: -7.8 to +34.8\n" in text
    assert "**reproduced (over the seeds: undecided)**" in text


def test_scores_of_other_pairs_are_never_compared(tmp_path):
    """Runs of before and after the score on all pairs meet in the held-out ones, which both have, and so do means."""
    runs = write_records(tmp_path / "runs", ("random", "debiased"), range(5))
    write_scores(runs, "debiased", [70.0] * 5, ALL_UNSEEN)  # of 70 on all pairs, and 240 or so on the held-out ones
    assert "190.0 -> 242.0: +52.0 (+50.0 to +54.0), held-out pairs |" in page_of(runs)
    write_scores(runs, "random", (50.0, 51.0, 52.0, 53.0), ALL_UNSEEN)
    table = ablation_report.conditions_table(ablation_report.read_records(runs), ["random"])
    assert "190.0 (150.0-230.0), held-out pairs" in table and "(50.0-" not in table
    write_scores(runs, "random", (50.0, 51.0, 52.0, 53.0, 54.0), ALL_UNSEEN)
    assert "52.0 -> 70.0: +18.0 (+16.0 to +20.0) |" in page_of(runs)
    table = ablation_report.conditions_table(ablation_report.read_records(runs), ["random"])
    assert "52.0 (50.0-54.0) |" in table and "held-out" not in table
    # A sixth seed of before is left out, now that there are five.
    write_records(runs, ("random", "debiased"), (5,))
    assert "52.0 -> 70.0: +18.0 (+16.0 to +20.0) | < 0.001 | 5 |" in page_of(runs)


@pytest.mark.parametrize(("gain", "others"), [(0.0, "1 of 1"), (50.0, "0 of 1")])
def test_rows_that_the_held_out_pairs_alone_would_decide_otherwise_are_named(tmp_path, gain, others):
    """Debiased sampling gains 50 to 54 on the held-out pairs; on all of them nothing, or as much."""
    for name in ("random", "debiased"):
        scores = [80.0 + seed + (gain if name == "debiased" else 0.0) for seed in range(5)]
        write_scores(tmp_path / "runs", name, scores, ALL_UNSEEN)
    line = line_of(page_of(tmp_path / "runs"), "- **By the held-out pairs alone")
    assert f"{others} rows that have both scores would have another verdict: " in line, line
    assert ("debiased - random (reproduced in place of no difference)" in line) is (gain == 0.0)


def test_what_stands_against_the_number_of_rows_is_marked_in_short(tmp_path):
    # Debiased sampling and W = 0.3 gain 50 to 54 over random and do not differ.
    text = page_of(write_records(tmp_path / "runs", ("random", "debiased", "weight-0.3"), range(5)))
    higher = "- **Higher**: debiased sampling over random, emoji\u2020 +52.0 (+50.0 to +54.0), held-out pairs."
    assert line_of(text, "- **Higher") == higher
    line = line_of(text, "- **Many rows")
    assert "2 of 3 intervals miss zero; " in line
    assert line.endswith(": debiased - random (Table 3), weight-0.3 - random (Negatives of other sources).")


def test_an_unseen_source_is_scored_on_all_its_pairs(tmp_path):
    data = tiny_emoji(tmp_path / "data", pairs=500)
    test = Measurements(Ablation({"emoji": data}, tmp_path / "out", QUICK)).samples("emoji")["fluent"]
    pools = unseen_pools(data, "fluent", test)
    pairs = [sample for pool in pools for sample in pool]
    assert [len(pool) for pool in pools] == [200, 200]  # of 500 training and 12 test pairs
    assert {sample.source for sample in pairs} == {"fluent"} and len({sample.concept for sample in pairs}) == 400
    held_out = {sample.concept for sample in test if sample.held_out}
    assert held_out & {sample.concept for sample in pairs} and all(sample.held_out for sample in pairs)
    again = [sample for pool in unseen_pools(data, "fluent", test) for sample in pool]
    assert [sample.concept for sample in pairs] == [sample.concept for sample in again]


def test_runs_that_do_not_stand_side_by_side_are_refused(tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        ablation_report.read_records(tmp_path)
    write_records(tmp_path, ("random",), (0,))
    write_records(tmp_path, ("debiased",), (0,), choices={"epochs": "9"})
    with pytest.raises(UserError, match=r"several values of epochs, \['2', '9'\]"):
        ablation_report.read_records(tmp_path)
    flags = record("random", 0)["flags"]
    write_records(tmp_path, ("debiased",), (0,), flags=["--cross-source-weight", "0.5", *flags])
    with pytest.raises(
        UserError, match=r"debiased-seed0 of .* other settings than the condition has now \(--sampling\)"
    ):
        ablation_report.read_records(tmp_path)


# --- all of it -------------------------------------------------------------------------------------------------------


def tiny_emoji(out: Path, *, pairs: int, held_out: int = 12, sources=tuple(EMOJI.sources)) -> Path:
    """Four sources in the layout of `python -m scripts.drawn emoji`: noise of 16 px, captions of one to ten words."""
    rng = np.random.default_rng(0)
    words = ["red", "green", "blue", "small", "big", "round", "cat", "dog", "house", "tree"]

    def sample(source: str, number: int, held: bool = False) -> Sample:
        png = out / "picture.png"
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(png)
        caption = " ".join(rng.permutation(words)[: 1 + number % 10])
        facts = {"concept": f"c{number}", "source": source, "group": "g", "held_out": "test" if held else None}
        files = {"png": png.read_bytes(), "txt": caption.encode(), "json": json.dumps(facts).encode()}
        return Sample(f"{source}-c{number}", files)

    out.mkdir(parents=True)
    for i, source in enumerate(sources):
        write_source(out / source, [sample(source, 1000 + n) for n in range(pairs)], shard_size=64)
        every = [sample(source, n, n // held_out == i) for n in range(held_out * len(sources))]
        write_retrieval_set(out / "test-across" / source, every)
    write_bert(out / "bert")
    return out


def test_every_second_caption_becomes_its_groups_name(tmp_path):
    data = tiny_emoji(tmp_path / "data", pairs=10, sources=("noto", "fluent"))
    ablation_sources.write_groups(data, {source: tmp_path / "groups" / source for source in ("noto", "fluent")})
    for source in ("noto", "fluent"):
        before, after = ([*read_samples(folder / source / "train-00000.tar")] for folder in (data, tmp_path / "groups"))
        assert [pair.key for pair in after] == [pair.key for pair in before]
        assert [pair.files["png"] for pair in after] == [pair.files["png"] for pair in before]
        captions = {pair.key: pair.files["txt"].decode() for pair in after}
        assert [captions[key] == "g" for key in sorted(captions)] == [True, False] * 5
        assert all(captions[pair.key] in ("g", pair.files["txt"].decode()) for pair in before)
    with pytest.raises(UserError, match="holds no shards"):
        ablation_sources.write_groups(data, {"mdi": tmp_path / "others"})


@pytest.mark.slow  # ten trainings in processes of their own, a k-means and another start of `zerovl`: about a minute
def test_real_runs_are_trained_measured_and_reported(tmp_path):
    real = ablation_in(tmp_path, {**QUICK, "epochs": "1"})
    tiny_emoji(real.data["emoji"], pairs=200)
    names = ["contexts-debiased", "gather", "clusters", "auxiliary", "student-half", "repeated-positives"]
    assert run.run_all(real, real.plan([0], names), 2) == {}
    records = ablation_report.read_records(real.out)
    for name in names:
        found = records[name][0]
        assert all(0 <= value <= 600 for value in found["rsum"].values() if value is not None)
        assert found["loss_curve"] and found["cpu_seconds"] > 1 and 0 <= found["probe_images"] <= 1
        assert (
            found["score"]
            == found["rsum"][ALL_UNSEEN if CONDITIONS[name].score == "unseen" else CONDITIONS[name].score]
        )
    # The frame is a source to a model that is asked for it: noise pictures have nothing else in common.
    assert records["contexts-debiased"][0]["probe_chance"] == 0.5
    assert 0 <= records["clusters"][0]["shared_information"] <= 1
    assert len(records["auxiliary"][0]["score_by_epoch"]) == 1
    assert "noto=" not in " ".join(records["gather"][0]["flags"]) and records["gather"][0]["unseen"] == "noto"
    assert real.plan([0], names) == []
    ablation_report.write_page(records, tmp_path / "page.md")
    assert "Not finished" in (tmp_path / "page.md").read_text()
