"""`make ablation`: flags, what is kept and begun again, order and failures of runs, the rule of the verdicts, the page."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.datasets.drawn import DrawnSample
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.tar.members import Sample, read_samples
from open_clip_zerovl.tar.shards import write_retrieval_set, write_source
from scripts import demo
from scripts.ablation import report as ablation_report
from scripts.ablation import run as ablation
from scripts.ablation import sources as ablation_sources
from scripts.ablation.conditions import CONDITIONS, TABLES
from scripts.ablation.report import CONTRADICTED, INVISIBLE, NO_VERDICT, NOT_RUN, REPRODUCED, REPRODUCED_SAME, judge
from scripts.ablation.run import Ablation, Ended, Job, samples_per_second, thinned
from scripts.emoji import runs as emoji_runs
from scripts.emoji.runs import TrainingRun, emoji_flags, flag_value, merge_flags
from support.tiny_clip import write_bert
from training.params import parse

# --- flags -----------------------------------------------------------------------------------------------------------


def test_flags_replace_those_of_the_same_name_and_keep_the_others():
    base = ["--lr", "1e-3", "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)", "--dga-retain", "auto"]
    merged = merge_flags(base, ["--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--lr=2e-3"])
    assert merged == ["--dga-retain", "auto", "--aug-cfg", "scale=(0.6,1.0)", "--coin-flip-mixup", "--lr", "2e-3"]
    assert merge_flags(base, []) == base
    # A flag that may come twice comes twice.
    assert merge_flags(["--freeze", "image"], ["--freeze", "text", "--freeze", "image"])[1::2] == ["text", "image"]
    with pytest.raises(UserError, match="begin with --.*'0.2'"):
        merge_flags(base, ["0.2"])


def test_the_demo_takes_training_flags_but_not_what_it_compares():
    assert demo.checked_flags(["--text-augment", "0.2"]) == ("--text-augment", "0.2")
    for own in ("--sampling", "--epochs", "--seed=3", "--name"):
        with pytest.raises(UserError, match=r"the demo sets --\S+ itself"):
            demo.checked_flags(["--coin-flip-mixup", own, "x"])
    settings = demo.Settings(Path("data"), Path("out"), Path("p.png"), 3, 7, "val", ("--lr", "5e-4"))
    flags = demo.training_run(settings, "random").flags
    assert [flag_value(flags, f"--{name}") for name in ("lr", "epochs", "seed", "sampling")] == [
        "5e-4",
        "3",
        "7",
        "random",
    ]
    assert flags.count("--lr") == 1


def test_a_run_of_other_flags_is_not_taken_for_finished(tmp_path):
    def of(*more: str) -> TrainingRun:
        flags = emoji_flags(tmp_path, sampling="random", epochs=2, seed=0, more=more)
        return TrainingRun(tmp_path / "runs" / "random", tuple(flags))

    done = of()
    done.checkpoint.parent.mkdir(parents=True)
    done.checkpoint.touch()
    assert not done.is_finished()  # nobody knows of which flags it is
    done.asked.write_text(json.dumps({"flags": list(done.flags), "ranks": 1}))
    assert done.is_finished() and of().is_finished()
    assert not of("--text-augment", "0.2").is_finished()
    assert not TrainingRun(done.folder, done.flags, ranks=2).is_finished()


@pytest.mark.parametrize("name", CONDITIONS)
def test_open_clips_parser_takes_every_condition(name, tmp_path):
    run = Ablation(tmp_path, tmp_path / "out", 3).training_run(Job(1, name))
    args, config = parse([*run.flags, "--logs", "x", "--name", "y"])
    condition = CONDITIONS[name]
    # Every run shows as many samples, and nothing differs from the demo's flags but what the condition names.
    assert args.epochs == 3 * condition.epochs and args.seed == 1 and config.sampling == condition.sampling
    plain = emoji_flags(tmp_path, sampling=condition.sampling, epochs=args.epochs, seed=1)
    named = {*emoji_runs.flag_names(condition.flags), "--train-data", "--init-from"}
    ours, theirs = ([group for group in emoji_runs._groups(f) if group[0] not in named] for f in (run.flags, plain))
    assert ours == theirs
    assert ("--init-from" in run.flags) == (condition.init_from is not None)


def test_the_tables_name_conditions_that_are_there_and_use_all():
    used = {name for table in TABLES for name in table.conditions}
    assert used == set(CONDITIONS)
    for table in TABLES:
        for one in table.comparisons:
            assert {one.run, one.against} <= set(CONDITIONS)
            # The claim is that of the paper's own numbers.
            if one.paper and one.claim in ("higher", "lower"):
                signs = {(a > b) == (one.claim == "higher") for a, b in zip(*one.paper, strict=True)}
                assert signs == {True}
    assert all(one.needs is None or one.needs in CONDITIONS for one in CONDITIONS.values())


# --- runs ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for the measurements: writes what was asked, and remembers the order."""

    def __init__(self, which: Ablation) -> None:
        self.which, self.seen = which, []
        Recorder.last = self

    def write(self, ended: Ended) -> dict:
        self.seen.append(str(ended.job))
        assert self.which.training_run(ended.job).checkpoint.is_file()
        record = {**self.which.asked(ended.job), "rsum": {"within": 1.0}}
        self.which.record_file(ended.job).write_text(json.dumps(record))
        return record


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """An ablation whose training is a shell command that leaves the checkpoint, or fails for `vit`."""

    def command(self: TrainingRun) -> list[str]:
        work = f"mkdir -p {self.checkpoint.parent} && touch {self.checkpoint} {self.log}"
        return ["sh", "-c", "echo no such tower >&2; exit 3" if "vit-" in self.folder.name else work]

    monkeypatch.setattr(TrainingRun, "command", command)
    monkeypatch.setattr(ablation, "Measurements", Recorder)
    monkeypatch.setattr(ablation, "prepare", lambda *_: None)
    return Ablation(tmp_path / "data", tmp_path / "out", 2)


def test_runs_come_seed_by_seed_behind_what_they_are_built_on_and_are_kept(quick):
    names = ["auxiliary", "clusters", "debiased"]
    jobs = quick.plan([0, 1], names)
    assert [str(job) for job in jobs if job.seed == 0] == [
        f"{n}-seed0" for n in ("random", "debiased", "mixup", "auxiliary", "clusters")
    ]
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert ablation.run_all(quick, jobs, 1) == {}
    order = Recorder.last.seen
    assert order.index("mixup-seed1") < order.index("auxiliary-seed1") and len(order) == 10
    # What was measured is kept, and its checkpoints are gone once nothing is to be built on them.
    assert quick.plan([0, 1], names) == []
    assert not list(quick.out.rglob("epoch_2.pt"))

    # Other flags, or a base of other flags, begin again; and the base is trained again, since its checkpoint is gone.
    longer = Ablation(quick.data, quick.out, 3)
    assert len(longer.plan([0], names)) == 5
    record = json.loads(quick.record_file(Job(0, "auxiliary")).read_text())
    quick.record_file(Job(0, "auxiliary")).write_text(json.dumps({**record, "built_on": ["--lr", "5"]}))
    assert [job.name for job in quick.plan([0, 1], names)] == ["mixup", "auxiliary"]


def test_an_interrupted_run_begins_again(quick):
    run = quick.training_run(Job(0, "random"))
    run.folder.mkdir(parents=True)
    (run.folder / "half.pt").touch()
    assert quick.plan([0], ["random"]) == [Job(0, "random")]
    assert ablation.run_all(quick, [Job(0, "random")], 2) == {}
    assert not (run.folder / "half.pt").exists()
    # The clusters are still to come: their base keeps its checkpoint.
    assert run.is_finished() and quick.plan([0], ["clusters"]) == [Job(0, "clusters")]


def test_a_run_that_fails_is_told_and_stops_only_what_is_built_on_it(quick, monkeypatch):
    failed = ablation.run_all(quick, quick.plan([0], ["vit", "token-drop"]), 2)
    assert failed == {Job(0, "vit"): "the training ended with status 3: no such tower"}
    assert quick.is_recorded(Job(0, "token-drop")) and not quick.is_recorded(Job(0, "vit"))
    monkeypatch.setattr(TrainingRun, "command", lambda _: ["false"])
    failed = ablation.run_all(quick, quick.plan([0], ["auxiliary"]), 1)
    assert failed[Job(0, "auxiliary")] == "mixup-seed0 failed"


def test_processes_take_no_more_slots_than_there_are(quick):
    processes = ablation.Processes(2)
    processes.start(Job(0, "gather"), quick.training_run(Job(0, "gather")))  # two ranks
    assert not processes.has_room(1)
    ended = processes.next_ended()
    assert ended.status == 0 and ended.wall_seconds > 0 and processes.has_room(2)
    assert ablation.Processes(1).has_room(2)  # two ranks on one core, alone


def test_bad_arguments_are_a_sentence(capsys, tmp_path):
    for argv, words in (
        (["--only", "debiased,nosuch"], "no condition 'nosuch'"),
        (["--seeds", "one"], "--seeds takes numbers"),
        (["--epochs", "0"], "1 or more"),
    ):
        assert ablation.main([*argv, "--out", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err


def test_a_curve_is_thinned_by_means_and_speed_read_from_the_log(tmp_path):
    curve = [(64 * i, float(i)) for i in range(1, 11)]
    assert thinned(curve, 5) == [(64 * i, i - 0.5) for i in (2, 4, 6, 8, 10)]
    assert thinned(curve) == curve
    line = "2026-11-21,09:00:{:02d} | INFO | Train Epoch: {} [{:4d}/5568 (1%)] Data (t): 0.1 Loss: 4.1 (4.2)\n"
    log = tmp_path / "out.log"
    log.write_text(line.format(10, 0, 64) + "other\n" + line.format(30, 1, 64))
    assert samples_per_second(log) == 5568 / 20
    log.write_text(line.format(10, 0, 64))
    assert samples_per_second(log) is None


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
    pairs = ablation_sources.ContextPairs.of(samples, tmp_path / "contexts")
    red = ablation_sources.FRAME
    for context, frame, other in (("long", True, False), ("short", False, True)):
        assert pairs.own[context] and all((s.image.getpixel((0, 0)) == red) == frame for s in pairs.own[context])
        assert all((s.image.getpixel((0, 0)) == red) == other for s in pairs.other[context])
        assert [s.caption for s in pairs.own[context]] == [s.caption for s in pairs.other[context]]
    assert sum(map(len, pairs.own.values())) == 8  # what is not held out is left out
    assert grey.getpixel((0, 0)) != red


# --- the verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "run", "against", "verdict"),
    [
        ("higher", (20, 22, 21), (10, 12, 11), REPRODUCED),
        ("higher", (10, 12, 11), (20, 22, 21), CONTRADICTED),
        ("lower", (10, 12, 11), (20, 22, 21), REPRODUCED),
        ("lower", (20, 22, 21), (10, 12, 11), CONTRADICTED),
        ("higher", (20, 22, 21), (19, 20, 20), INVISIBLE),
        ("higher", (10, 22, 21), (9, 9, 9), INVISIBLE),  # the larger of the two spreads, 12, decides
        ("higher", (9.5, 9.5, 9.5), (9, 9, 9), REPRODUCED),
        ("same", (20, 22, 21), (19, 20, 20), REPRODUCED_SAME),
        ("same", (20, 22, 21), (10, 12, 11), CONTRADICTED),
        ("different", (20, 22, 21), (10, 12, 11), REPRODUCED),
        ("different", (10, 12, 11), (20, 22, 21), REPRODUCED),
        ("different", (20, 22, 21), (19, 20, 20), INVISIBLE),
        ("higher", (20,), (1,), NO_VERDICT),
        ("same", (), (1, 2), NOT_RUN),
    ],
)
def test_the_rule(claim, run, against, verdict):
    assert judge(claim, dict(enumerate(run)), dict(enumerate(against))).verdict == verdict


def test_only_seeds_that_both_have_are_compared():
    result = judge("higher", {0: 10.0, 1: 12.0, 2: 500.0}, {0: 5.0, 1: 5.0, 7: -500.0})
    assert (result.seeds, result.run, result.against, result.spread, result.difference) == (2, 11, 5, 2, 6)


def record(name: str, seed: int, **change) -> dict:
    """A record as the runner writes it; debiased gains 50 within and across and loses 20 mixed."""
    gain = 0 if name == "random" else 50
    return {
        "condition": name, "seed": seed, "epochs": 2, "split": "test", "ranks": 1, "flags": [], "built_on": None,
        "loss_curve": [[64, 5.0], [128, 4.0]],
        "rsum": {"within": 200.0 + gain + seed, "across": 150.0 + gain + seed, "mixed": 150.0 - 0.4 * gain},
        "probe_images": 0.63, "probe_texts": 0.9, "probe_chance": 0.25, "log_p_same_source": -20.0,
        "log_p_other_source": -25.0, "samples": 128, "wall_seconds": 9.0, "cpu_seconds": 36.0, "samples_per_second": 400.0,
        **change,
    }  # fmt: skip


def write_records(folder: Path, names, seeds, **change) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for seed in seeds:
            (folder / f"{name}-seed{seed}.json").write_text(json.dumps(record(name, seed, **change)))
    return folder


def test_the_page_has_every_table_its_numbers_and_a_figure_and_is_made_again_from_its_own_records(tmp_path, capsys):
    runs = write_records(tmp_path / "runs", CONDITIONS, (0, 1, 2))
    page = tmp_path / "docs" / "results.md"
    assert ablation_report.main(["--runs", str(runs), "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    text = page.read_text()
    for table in TABLES:
        assert f"## {table.name}: {table.title}" in text
    pictures = [page.parent / line[line.index("(") + 1 : -1] for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == len(TABLES) and all(Image.open(picture).size[0] > 500 for picture in pictures)

    row = next(line for line in text.splitlines() if line.startswith("| Table 3 | Debiased sampling"))
    assert "176.0 -> 226.0 (+50.0)" in row and "COCO 371.6 -> 392.3 (+20.7), F30K 483.3 -> 510.1 (+26.8)" in row
    assert [cell.strip() for cell in row.split("|")][4] == "2.0" and REPRODUCED in row and row in printed
    mixup = next(line for line in text.splitlines() if line.startswith("| Table 3 | Coin-flip"))
    assert "(+0.0)" in mixup and INVISIBLE in mixup  # a row that shows nothing stays in
    assert "| random | 201.0 (200.0-202.0) |" in text
    assert "36 -> 36 CPU s (x 1.00)" in text and "430 -> 600 GPU h (x 1.40)" in text
    assert str(tmp_path) not in text and "One seed only" not in text

    again = tmp_path / "again" / "results.md"
    ablation_report.write_page(ablation_report.read_records(page.parent / "results" / "runs.json"), again)
    assert again.read_text() == text


def test_one_seed_and_missing_runs_are_said(tmp_path):
    runs = write_records(tmp_path / "runs", ("random", "debiased"), (0,))
    page = tmp_path / "results.md"
    ablation_report.write_page(ablation_report.read_records(runs), page)
    text = page.read_text()
    assert "One seed only" in text and NO_VERDICT in text and NOT_RUN in text
    assert REPRODUCED not in text.split("## How to read it")[0]


def test_runs_that_do_not_stand_side_by_side_are_refused(tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        ablation_report.read_records(tmp_path)
    write_records(tmp_path, ("random",), (0,))
    write_records(tmp_path, ("debiased",), (0,), epochs=5)
    with pytest.raises(UserError, match="several lengths or splits"):
        ablation_report.read_records(tmp_path)


# --- all of it -------------------------------------------------------------------------------------------------------


def tiny_emoji(out: Path, *, pairs: int, held_out: int = 12) -> Path:
    """Four sources in the layout of `zerovl data emoji`: noise of 16 px, captions of one to ten words."""
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
    for i, source in enumerate(emoji_runs.SOURCES):
        write_source(out / source, [sample(source, 1000 + n) for n in range(pairs)], shard_size=64)
        every = [sample(source, n, n // held_out == i) for n in range(held_out * len(emoji_runs.SOURCES))]
        write_retrieval_set(out / "test-across" / source, every)
    write_bert(out / "bert")
    return out


@pytest.mark.slow  # four trainings in processes of their own, a k-means and another start of `zerovl`: about a minute
def test_real_runs_are_trained_measured_and_reported(tmp_path):
    data = tiny_emoji(tmp_path / "data", pairs=130)
    real = Ablation(data, tmp_path / "out", 1)
    names = ["context-debiased", "gather", "clusters"]
    assert ablation.run_all(real, real.plan([0], names), 2) == {}
    records = ablation_report.read_records(real.out)
    for name in ["random", *names]:
        found = records[name][0]
        assert set(found["rsum"]) == {"within", "across", "mixed"} and all(
            0 <= v <= 600 for v in found["rsum"].values()
        )
        assert found["loss_curve"] and found["cpu_seconds"] > 1 and 0 <= found["probe_images"] <= 1
        assert found["samples"] >= 512 - 64
    # The frame is a source to a model that is asked for it: noise pictures have nothing else in common.
    assert records["context-debiased"][0]["probe_chance"] == 0.5
    assert not list(real.out.rglob("epoch_*.pt")) and not real.clusters(0).exists()
    assert real.plan([0], names) == []
    ablation_report.write_page(records, tmp_path / "page.md")
    assert "One seed only" in (tmp_path / "page.md").read_text()
