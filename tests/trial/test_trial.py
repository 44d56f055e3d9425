"""`zerovl trial`: stopped and continued, more seeds, refusals. Trainings are stand-ins, but for a slow test."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import difference as claim_difference
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.core.processes import TrainingStopped
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.splits import write_trained_on
from open_clip_zerovl.finetune.data import DataArguments, find_data, open_sources, sets_of
from open_clip_zerovl.finetune.request import SETS, FinetuneFlags, FinetuneRequest
from open_clip_zerovl.finetune.split import set_identities, source_identities
from open_clip_zerovl.models.build import with_text_model
from open_clip_zerovl.recipe.flags import settings_of
from open_clip_zerovl.sampling.schedule import source_schedule
from open_clip_zerovl.shards.files import write_retrieval_set, write_source
from open_clip_zerovl.shards.tar import Sample
from open_clip_zerovl.trial import inputs, running
from open_clip_zerovl.trial.flags import TrialFlags
from support.pairs import picture
from support.tiny_clip import random_model, write_bert, write_run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint of the demo's model, and two sources."""
    folder = tmp_path_factory.mktemp("trial")
    bert = write_bert(folder / "bert")
    settings = {"model": "zerovl-emoji", "text_model": str(bert)}
    model = random_model(with_text_model("zerovl-emoji", bert), seed=1)
    write_run(folder / "start", model, settings)
    for source, first in (("one", 0), ("two", 1000)):
        pairs = [
            Sample(f"{n:05d}", {"png": picture(first + n), "txt": f"picture {n}".encode()})
            for n in range(60)
        ]
        write_source(folder / "mine" / source, pairs, shard_size=60)
    return folder


def words(made: Path, out: Path, *more: str) -> list[str]:
    start = made / "start" / "checkpoints" / "epoch_1.pt"
    return [
        "trial", "--from", str(start), "--data", str(made / "mine"), "--out", str(out), "--device", "cpu",
        "--micro-batch", "4", "--effective-batch", "8", "--rates", "1e-4,1e-3", "--minutes", "0.5", "--seeds", "3", *more,
    ]  # fmt: skip


class Trainings:
    """Stand-ins for trainings: each writes weights that its flags decide; `left` of them are made before Ctrl-C.

    A sample of DGA takes twice the time of one of plain. The real schedule of the sources refuses what a run would refuse.
    """

    def __init__(self, made: Path) -> None:
        self.bert, self.left = made / "bert", 1000
        self.flags: list[dict] = []
        self.diverging = ""

    def __call__(self, arguments: list[str], processes: int, *, log: Path) -> Trainings:
        self.flags.append(settings_of(arguments))
        return self

    def samples(self, flags: dict) -> int:
        sources = open_sources(flags["train-data"])
        passes = [float(each) for each in flags["train-data-upsampling-factors"].split("::")]
        batch = int(flags["batch-size"]) * int(flags.get("dga-steps", 1))
        sizes = [source.num_samples for source in sources]
        schedule = source_schedule(
            sizes, batch, strategy=flags.get("sampling", "random"), seed=0, epoch=0, weights=passes
        )
        assert flags["captions"] in ("one-per-epoch", "all")
        return schedule.steps * batch

    def check(self) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        flags = self.flags[-1]
        if self.diverging and flags["name"].startswith(self.diverging):
            raise UserError("the loss is not finite")
        own = [flags.get(name, "") for name in ("name", "lr", "seed", "sampling", "dga-steps")]
        model = with_text_model("zerovl-emoji", self.bert)
        folder = Path(flags["logs"]) / flags["name"]
        settings = {"model": "zerovl-emoji", "text_model": str(self.bert)}
        write_run(folder, random_model(model, seed=zlib.crc32(" ".join(own).encode())), settings)
        seconds = self.samples(flags) * (0.02 if "dga-steps" in flags else 0.01)
        lines = [{"kind": "step", "at": at, "time": 50 + at * seconds} for at in (0.5, 0.75, 1.0)]
        start = {"kind": "start", "at": 0, "time": 0}
        (folder / "record.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in [start, *lines])
        )

    def stop(self) -> None:
        pass


@pytest.fixture
def trainings(made, monkeypatch) -> Trainings:
    stand_in = Trainings(made)
    monkeypatch.setattr(running, "start_training", stand_in)
    return stand_in


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The folder and the trainings of a trial of three seeds that was not stopped."""
    out, trainings = tmp_path_factory.mktemp("whole") / "out", Trainings(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "start_training", trainings)
        main(words(made, out))
    return out, trainings


def table_of(out: Path) -> dict:
    return {**json.loads((out / "result.json").read_text()), "command": ""}


def test_arms_share_everything_but_their_method(whole):
    _, trainings = whole
    runs = [one for one in trainings.flags if one["name"].startswith("run-")]
    assert len(runs) == 4 * 3
    own = ("sampling", "dga-steps", "dga-retain", "coin-flip-mixup")
    length = ("train-data-upsampling-factors", "save-every-steps", "log-every-n-steps")
    free = ("lr", "lr-min", "name", *length, *own)
    shared = [{flag: one[flag] for flag in one if flag not in free} for one in runs]
    for seed in range(3):
        of_seed = [one for one in shared if one["seed"] == str(seed)]
        assert len(of_seed) == 4 and all(one == of_seed[0] for one in of_seed)
    by_arm = {one["name"].split("-")[1]: [one.get(flag) for flag in own] for one in runs}
    assert by_arm == {
        "plain": ["random", None, None, None],
        "dga": ["random", "2", "auto", None],
        "debiased": ["debiased", "2", "auto", None],
        "recipe": ["debiased", "2", "auto", ""],
    }


def test_arms_take_the_same_time(whole):
    """A sample of dga takes twice the time of one of plain, so that it sees half as many. 4 arms of 2 pilots and 3 runs."""
    out, _ = whole
    plan = json.loads((out / "plan.json").read_text())
    assert plan["samples"] == {"plain": 144, "dga": 72, "debiased": 72, "recipe": 72}
    assert [len(times) for times in plan["seconds_a_sample"].values()] == [2] * 4
    table = {row["mean over seeds"]: row for row in table_of(out)["means"]}
    assert table["samples of a run"]["dga"] == "72" and table["seconds of a run"]["dga"] == "1"


def test_each_arm_takes_the_rate_that_is_best_on_validation(whole):
    out, _ = whole
    records = [json.loads(file.read_text()) for file in (out / "records").glob("*-*.json")]
    for arm in ("plain", "dga"):
        own = [one for one in records if one["arm"] == arm]
        pilots = {one["rate"]: one["scores"]["mean recall"] for one in own if one["pilot"]}
        (used,) = {one["rate"] for one in own if not one["pilot"]}
        assert {1e-4, 1e-3} <= pilots.keys() and pilots[used] == max(pilots.values())
        chance = {one["pilot"]: one["chance"]["mean recall"] for one in own}
        # The validation set has a picture less than the test set.
        assert chance[True] > chance[False]


@pytest.mark.parametrize("before", [5, 30])  # while times are measured, and in a run
def test_a_stopped_trial_ends_with_the_same_table(made, whole, trainings, tmp_path, before):
    out = tmp_path / "out"
    trainings.left = before
    assert main(words(made, out)) == 130
    trainings.left = 1000
    main(words(made, out))
    assert table_of(out) == table_of(whole[0])


def test_arms_that_learned_nothing_have_no_verdict_and_no_command(whole):
    """The stand-ins' weights are random, as those of the model before training."""
    table = json.loads((whole[0] / "result.json").read_text())
    assert (table["winner"], table["command"], table["differences"]) == (None, "", [])
    assert all(float(table["means"][-1][column]) > 0 for column in ("chance", "start model"))


def test_the_command_for_the_winner_trains_without_test_and_validation_pictures(
    made, trainings, tmp_path, monkeypatch
):
    monkeypatch.setattr(inputs, "not_above_chance", lambda metrics: False)
    monkeypatch.chdir(tmp_path)
    main(words(made, tmp_path / "out", "--arms", "plain,dga", "--seeds", "2"))
    command = json.loads((tmp_path / "out" / "result.json").read_text())["command"]
    assert "--retrieval-data held-out=out/data/test/held-out" in command
    assert "--train-data one=out/data/validation/rest/one-" in command


def test_more_seeds_later_are_added_and_a_margin_that_changes_is_shown(
    made, whole, trainings, tmp_path
):
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    main(words(made, out, "--seeds", "4"))
    assert [one["name"].rpartition("-")[2] for one in trainings.flags] == ["3"] * 4
    assert table_of(out)["looks"] == [
        {"--seeds": seeds, "--rates": [1e-4, 1e-3], "--margin": 1.0} for seeds in (3, 4)
    ]
    assert any("this is look 2" in note for note in table_of(out)["notes"])
    length = "train-data-upsampling-factors"
    before = {one[length] for one in whole[1].flags if one["name"].startswith("run-")}
    assert {one[length] for one in trainings.flags} == before
    for margin in ("0.5", "0.5", "1"):
        main(words(made, out, "--seeds", "4", "--margin", margin))
    notes, looks = table_of(out)["notes"], table_of(out)["looks"]
    assert "--margin was changed after scores were known: 1.0, then 0.5." in notes
    assert len(looks) == 4 and not any("this is look 3" in note for note in notes)


def test_more_seeds_are_of_the_same_data_and_model_wherever_they_lie(
    made, whole, trainings, tmp_path, capsys
):
    """Seeds on other pictures stood in one table with those of the first ones."""
    out, data, start = tmp_path / "out", tmp_path / "other", tmp_path / "start"
    shutil.copytree(whole[0], out)
    shutil.copytree(made / "mine", data)
    shutil.copytree(made / "start", start)
    model = start / "checkpoints" / "epoch_1.pt"
    given = words(made, out, "--seeds", "4", "--data", str(data), "--from", str(model))
    main(given)
    assert len(trainings.flags) == 4
    weights = model.read_bytes()
    model.write_bytes(b"others")
    assert main([*given, "--seeds", "5"]) == 2
    assert "out was begun with --from" in capsys.readouterr().err
    model.write_bytes(weights)
    pairs = [Sample(f"{n}", {"png": picture(n), "txt": b"a"}) for n in range(5000, 5060)]
    write_source(data / "two", pairs, shard_size=60)
    assert main([*given, "--seeds", "5"]) == 2
    assert "out was begun with --data" in capsys.readouterr().err
    assert len(trainings.flags) == 4


@pytest.mark.parametrize("flag", ["--retrieval-data", "--zero-shot-data", "--image"])
def test_each_data_argument_and_encoder_is_part_of_the_request(made, tmp_path, flag):
    def identity(number: int, place: Path) -> dict:
        shutil.rmtree(place, ignore_errors=True)
        files = {"png": picture(number), "txt": b"a cat", "cls": b"0"}
        write_retrieval_set(place, [Sample("0", files)])
        (place / "classnames.txt").write_text("cat\n")
        (place / "model.safetensors").write_bytes(b"%d" % number)
        given = {} if flag == "--image" else {flag[2:].replace("-", "_"): str(place)}
        request = inputs.Request(
            start=Encoder(""),
            data=f"x={made / 'mine' / 'one'}",
            out=tmp_path / "out",
            encoders=("timm:some-name" if given else f"timm:{place}", "hf:some/name"),
            **given,
        )
        return request.identity(DataArguments.of(request))

    first = identity(1, tmp_path / "set")
    assert claim_difference(first, identity(1, tmp_path / "copy")) is None
    assert claim_difference(first, identity(2, tmp_path / "set")).startswith(
        f"was begun before the content of {flag}"
    )


def test_encoders_are_aligned_on_what_the_runs_train_on(made, tmp_path, monkeypatch):
    """Else the first model would know the validation pictures, on which rates are chosen."""
    asked = []

    def align(request, say) -> None:
        asked.append(request)
        (request.out / "model").mkdir(parents=True)
        (request.out / "model" / "open_clip_config.json").touch()

    monkeypatch.setattr(inputs, "run_align", align)
    request = inputs.Request(
        start=Encoder(""),
        data=str(made / "mine"),
        out=tmp_path / "out",
        encoders=("timm:some-name", "hf:some/name"),
    )
    prepared = inputs.prepare(request, DataArguments.of(request), lambda *_: None)
    (aligned,) = asked
    assert aligned.train_data == prepared.train_data and "validation" in aligned.held_out
    samples = sum(source.num_samples for source in open_sources(aligned.train_data))
    held_out = [
        len(scored) for of in (prepared.test, prepared.validation) for scored in of.values()
    ]
    assert samples + sum(held_out) == 2 * 60 and len(held_out) >= 2


def test_a_diverging_pilot_does_not_end_the_trial(made, trainings, tmp_path, capsys):
    trainings.diverging = "pilot-dga-0.001"
    main(words(made, tmp_path / "out", "--arms", "plain,dga", "--seeds", "2"))
    content = table_of(tmp_path / "out")
    assert content["rates"]["dga"] != 1e-3
    assert "dga: the pilot at 0.001 failed: the loss is not finite." in content["notes"]
    trainings.diverging = "pilot-dga"
    assert main(words(made, tmp_path / "none", "--arms", "plain,dga", "--seeds", "2")) == 2
    assert "no pilot of dga could be trained: the loss is not finite" in capsys.readouterr().err


def test_a_pilot_that_was_stopped_is_no_failed_one(made, trainings, tmp_path, monkeypatch):
    def stopped() -> None:
        raise TrainingStopped("the training was stopped")

    main(
        words(made, tmp_path / "out", "--minutes", "0.01")
    )  # it measures, and ends before the pilots
    monkeypatch.setattr(trainings, "check", stopped)
    assert main(words(made, tmp_path / "out")) == 2
    assert not list((tmp_path / "out" / "records").glob("pilot-*"))


def test_sources_of_any_size_fill_whole_batches(made, trainings, tmp_path):
    """The stand-in asks the real schedule, which refuses a source of less than a batch."""
    data = tmp_path / "mine"
    for number, size in enumerate((40, 60, 90, 200)):
        pairs = [
            Sample(
                f"{n:05d}", {"png": picture(10_000 * number + n), "txt": f"picture {n}".encode()}
            )
            for n in range(size)
        ]
        write_source(data / f"s{number}", pairs, shard_size=size)
    more = ("--data", str(data), "--rates", "1e-3", "--seeds", "2")
    assert main(words(made, tmp_path / "out", *more)) == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    for flags in trainings.flags:
        if flags["name"].startswith("run"):
            arm = flags["name"].split("-")[1]
            assert trainings.samples(flags) == plan["samples"][arm]  # no part of a batch is lost


def class_folders(folder: Path, classes: int = 3, count: int = 20) -> Path:
    for label in range(classes):
        place = folder / f"kind {label}"
        place.mkdir(parents=True)
        for number in range(count * (1 + (label == 0))):
            (place / f"{number}.png").write_bytes(picture(1000 * label + number))
    return folder


def test_class_folders_are_judged_by_top1(made, trainings, tmp_path):
    packed = tmp_path / "packed"
    assert (
        main(
            [
                "data",
                "pack",
                str(class_folders(tmp_path / "raw")),
                "--out",
                str(packed),
                "--test-share",
                "0.2",
            ]
        )
        == 0
    )
    more = ("--data", str(packed), "--arms", "plain,dga", "--seeds", "2")
    main(words(made, tmp_path / "out", *more))
    (row,) = [
        row for row in table_of(tmp_path / "out")["means"] if row["mean over seeds"] == "top-1"
    ]
    assert row["chance"] == "33.3" and 40 < float(row["commonest class"]) < 60
    record = json.loads((tmp_path / "out" / "records" / "pilot-plain-0.001-100.json").read_text())
    assert [*record["scores"]] == ["top-1"]


def test_validation_comes_from_pictures_that_the_start_model_has_not_seen(
    made, trainings, tmp_path
):
    """The start model was trained on all pictures but those of the test set; no further ones are unseen."""
    packed, start = tmp_path / "packed", tmp_path / "start"
    pairs = [
        Sample(f"{n:03d}", {"png": picture(n), "txt": f"picture {n}".encode()}) for n in range(120)
    ]
    write_source(packed / "train", pairs[:96], shard_size=96)
    write_retrieval_set(packed, pairs[96:])
    main(["export", str(made / "start" / "checkpoints" / "epoch_1.pt"), str(start)])
    (source,) = open_sources(f"all={packed / 'train'}")
    seen = source_identities([source], tmp_path / "pictures")["all"]
    write_trained_on(start, seen, None)
    out = tmp_path / "out"
    more = ("--from", str(start), "--data", str(packed), "--arms", "plain,dga", "--seeds", "2")
    main(words(made, out, *more))
    notes = table_of(out)["notes"]
    assert notes[0].startswith("Half of the test pictures validate")
    assert not any("memorisation" in note for note in notes)
    # With too few unseen pictures, both are named.
    (test,) = sets_of(find_data(str(packed)).held_out).values()
    write_trained_on(start, np.union1d(seen, set_identities(test, tmp_path / "pictures")), None)
    main(words(made, tmp_path / "both", *more))
    said = " ".join(table_of(tmp_path / "both")["notes"])
    assert all(re.search(rf"of the \d+ {role} pictures", said) for role in ("test", "validation"))


def test_pictures_of_labelled_sets_are_not_trained_on(made, trainings, tmp_path):
    """They were trained on, and stood in the table without a note."""
    for number in range(20, 40):
        file = tmp_path / "labelled" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    trainings.left = 0
    out = tmp_path / "out"
    main(words(made, out, "--zero-shot-data", f"x={tmp_path / 'labelled'}"))
    first = open_sources(trainings.flags[0]["train-data"])[0]
    captions = {
        text
        for shard in range(len(first.shards))
        for one in samples_of(first, shard)
        for text in one.captions
    }
    assert captions and captions.isdisjoint(f"picture {number}" for number in range(20, 40))


def test_every_set_of_a_flag_is_a_data_argument(made):
    """So that it stands in the claim, and its pictures are held out."""
    for flags, request in ((TrialFlags, inputs.Request), (FinetuneFlags, FinetuneRequest)):
        sets = [each for each in flags_of(flags) if each.metavar == SETS]
        given = {each.name: f"{each.name}=/d" for each in sets}
        arguments = DataArguments.of(request(start=Encoder("x"), data="a=/a", out=made, **given))
        assert sets and {each.option for each in sets} <= arguments.given.keys()


def test_arms_of_a_file_are_compared_with_its_first(made, trainings, tmp_path):
    hot = {"dga-steps": 2.0, "temperature": 0.05, "coin-flip-mixup": True, "siglip": False}
    hot |= {"freeze-norm-statistics": None, "debiased-sampling": True}
    arms = {"small": {}, "hot": hot}
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    main(words(made, tmp_path / "out", "--arms", str(tmp_path / "arms.json"), "--seeds", "2"))
    assert [*table_of(tmp_path / "out")["rates"]] == ["small", "hot"]
    runs = [one for one in trainings.flags if one["name"].startswith("run-hot")]
    values = {tuple(run.get(flag) for flag in (*hot, "sampling")) for run in runs}
    assert values == {("2", "0.05", "", None, None, None, "debiased")}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ("--minutes", "0.01"),
            "leaves 0 batches of 8 a run, and 8 are needed; give --minutes 1 or more, a smaller --effective-batch",
        ),
        (("--effective-batch", "64"), "at most the"),
        (("--rates", "0,1e-4"), "--rates (0.0, 0.0001) is out of range; give positive numbers"),
        (
            ("--", "--epochs", "3"),
            "--epochs does not work with a trial, which sets it; give --minutes",
        ),
        (
            ("--", "--dga-steps", "2"),
            "--dga-steps does not work with a trial, which sets it; give --arms",
        ),
        (("--image", "timm:x", "--text", "hf:y"), "--from MODEL, or --image ENCODER --text"),
        (("--arms", "arms.json"), "--batch-size does not work with a trial"),
        (("--arms", "list.json"), '{"ARM": {"FLAG": VALUE}, ...}, two arms or more'),
    ],
)
def test_mistakes_end_in_a_sentence(made, trainings, tmp_path, monkeypatch, capsys, more, sentence):
    monkeypatch.chdir(tmp_path)
    Path("arms.json").write_text(json.dumps({"a": {}, "b": {"batch-size": "8"}}))
    Path("list.json").write_text(json.dumps({"a": {}, "b": {"dga-steps": [2, 4]}}))
    assert main(words(made, tmp_path / "out", *more)) == 2
    assert sentence in capsys.readouterr().err


def test_after_too_few_minutes_more_of_them_keep_data_and_first_model(made, trainings, tmp_path):
    """With other data both are made anew."""
    out = tmp_path / "out"
    assert main(words(made, out, "--minutes", "0.01")) == 2
    marks = [out / folder / "mark" for folder in ("data", "before")]
    for mark in marks:
        mark.touch()
    trainings.left = 0  # the next calls are stopped in their first training
    main(words(made, out))
    assert all(mark.exists() for mark in marks)
    main(words(made, out, "--data", str(made / "mine" / "one")))
    assert not any(mark.exists() for mark in marks)


@pytest.mark.parametrize(
    ("asked", "best", "tried", "at_end"),
    [
        ((1e-4, 3e-4, 1e-3), 3e-4, {1e-4, 3e-4, 1e-3}, False),
        ((1e-4, 3e-4, 1e-3), 3.3e-3, {1e-4, 3e-4, 1e-3, 3.3e-3, 1.1e-2}, False),
        ((1e-4, 3e-4, 1e-3), 3.3e-5, {1e-4, 3e-4, 1e-3, 3.3e-5, 1.1e-5}, False),
        ((1e-4, 1e-3), 1.0, {1e-4, 1e-3, 1e-2, 1e-1}, True),
        ((1e-4,), 1.0, {1e-4}, False),
        ((9.9e-5, 1e-4), 1.0, {9.9e-5, 1e-4}, True),  # the next one, rounded, is the last again
    ],
)
def test_a_best_rate_at_an_end_is_tried_beyond(asked, best, tried, at_end):
    """The score falls with the distance to `best`."""
    seen = set()

    def score(rate):
        seen.add(rate)
        return -abs(math.log(rate / best))

    assert running.best_rate(asked, score) == (max(tried, key=score), at_end)
    assert seen == tried


@pytest.mark.slow(reason="four real trainings; the rest of this file stands in for them")
@pytest.mark.timeout(1200)
def test_a_trial_with_real_trainings(made, tmp_path, monkeypatch):
    # Measured seconds would leave a loaded machine no samples.
    monkeypatch.setattr(running.Trial, "_seconds_a_sample", lambda self, arm: 0.05)
    main(words(made, tmp_path / "out", "--arms", "plain,recipe", "--seeds", "2", "--rates", "1e-3"))
    table = {row["mean over seeds"]: row for row in table_of(tmp_path / "out")["means"]}
    assert (
        float(table["mean recall"]["recipe"]) > 0 and float(table["seconds of a run"]["plain"]) > 0
    )
