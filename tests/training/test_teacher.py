"""`--teacher` through the whole program: the gradient is that of the dense loss, a resumed run ends with the same weights."""

from __future__ import annotations

import json
import re
import shutil

import open_clip
import pytest
import torch

from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources
from support.dense_loss import DenseLoss, set_by_set
from support.hash_teacher import HashEncoder
from support.programs import COMMON, flat_tensors, launch, state_of
from support.reinforced import embeddings_of, members_of
from support.replayed import gradient_errors
from support.tars import noise_jpeg, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION
from training.main import main

AUGMENTED = ["--aug-cfg", "scale=(0.3,1.0)"]
SETTINGS = TeacherSettings(views=2, image_size=32, aug_cfg={"scale": (0.3, 1.0)})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources, embedded by two teachers of two sizes, and the config of a student that drops patches."""
    folder = tmp_path_factory.mktemp("distilled")
    for name, first in (("a", 0), ("b", 100)):
        members = []
        for number in range(first, first + 32):
            members.append((f"{number:04d}.jpg", noise_jpeg(number, 50, 44)))
            members.append((f"{number:04d}.txt", f"{name} picture {number}".encode()))
        write_tar(folder / name / "00000.tar", members)
    vision = {**NATIVE_VISION, "patch_dropout": 0.25}
    (folder / "tiny.json").write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": vision, "text_cfg": CLIP_TEXT})
    )
    data = f"a={folder}/a::b={folder}/b"
    encoders = [HashEncoder(salt=1), HashEncoder("other", salt=2, size_px=20)]
    embed_sources(data, encoders, folder / "teacher", SETTINGS)
    return folder, data


def arguments_of(folder, data, name, *extra):
    words = f"""--train-data {data} --debiased-sampling --teacher {folder}/teacher {" ".join(AUGMENTED)} --batch-size 4
    --dga-steps 2 --epochs 1 --name {name} --force-custom-text"""
    return [*COMMON, *words.split(), *extra]


def recorded(folder, name, arguments, ranks):
    """Each of the first steps, as its ranks recorded it, with a student that has its weights; and the output of the run."""
    done = launch(
        "ours", folder / "tiny.json", arguments, ranks=ranks, gradient=folder / name, cwd=folder
    )
    open_clip.add_model_config(str(folder / "tiny.json"))
    steps = list(
        zip(
            *(torch.load(f"{folder}/{name}.{rank}", weights_only=True) for rank in range(ranks)),
            strict=True,
        )
    )
    assert steps
    model = open_clip.create_model("tiny", output_dict=True, force_custom_text=True).train()

    def each():
        for entries in steps:
            model.load_state_dict(entries[0]["weights"])
            yield entries, model

    return each(), done.stderr


def test_gradient_on_two_ranks_is_that_of_the_dense_loss(place):
    """Two ranks, two micro-batches, row chunks, patch dropout; with the weights swapped (control) it is another."""
    folder, data = place
    extra = [
        "--distill-weight",
        "0.7",
        "--distill-temperature",
        "0.5",
        "--loss-chunk",
        "3",
        "--workers",
        "1",
    ]
    steps, _ = recorded(folder, "gradient", arguments_of(folder, data, "gradient", *extra), ranks=2)
    for entries, model in steps:
        parts = [entry["loss_inputs"]["teacher_features"] for entry in entries]
        teachers = [
            tuple(torch.cat([part[number][side] for part in parts]).float() for side in (0, 1))
            for number in (0, 1)
        ]
        assert all(image.shape == text.shape == (16, 6) for image, text in teachers)
        assert parts[0][0][0].dtype == torch.float16
        found = {}
        for weight in (0.7, 0.3):
            dense = DenseLoss(distill_weight=weight, distill_temperature=0.5)
            value, found[weight] = gradient_errors(model, entries, dense, teacher_features=teachers)
            if weight == 0.7:
                assert all(
                    float(entry["loss"]) == pytest.approx(value, rel=1e-5) for entry in entries
                )
        assert max(found[0.7]) <= 5e-5
        assert min(found[0.3]) >= 0.05


def test_resumed_in_the_middle_of_an_epoch_ends_with_the_same_weights(place):
    """As after a kill: from the step checkpoint of a run's second step, in two loader workers; other teachers are refused."""
    folder, data = place
    extra = [
        "--workers=2",
        "--save-every-steps=2",
        "--keep-checkpoints=9",
        "--siglip",
        "--distill-weight=0.5",
    ]
    done = launch(
        "ours", folder / "tiny.json", arguments_of(folder, data, "whole", *extra), cwd=folder
    )
    assert re.search(r"By source: .*[ab] \S+", done.stderr)
    checkpoint = sorted((folder / "logs" / "whole" / "checkpoints").glob("step_0000_*.pt"))[0]
    resumed = [*arguments_of(folder, data, "resumed", *extra), "--resume", str(checkpoint)]
    launch("ours", folder / "tiny.json", resumed, cwd=folder)
    first, second = (flat_tensors(state_of(folder, name)) for name in ("whole", "resumed"))
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    shutil.move(folder / "teacher", folder / "first")
    try:
        embed_sources(data, [HashEncoder(salt=3)], folder / "teacher", SETTINGS)
        resumed[resumed.index("--name") + 1] = "other"
        done = launch("ours", folder / "tiny.json", resumed, cwd=folder, status=2)
        assert "was taken in the middle of epoch 0 with --teacher" in done.stderr
    finally:
        shutil.rmtree(folder / "teacher")
        shutil.move(folder / "first", folder / "teacher")


def reinforced(folder, name, captions, *extra):
    """Arguments of a run on shards that carry their teachers: 24 samples of 8 pictures, each with its own captions."""
    members = dict(member for number in range(24) for member in members_of(number, "whole"))
    members |= {f"{number:04d}.jpg": members[f"{number % 8:04d}.jpg"] for number in range(24)}
    write_tar(folder / "dr" / "00000.tar", list(members.items()))
    words = arguments_of(folder, f"dr={folder}/dr", name, "--workers", "1", *extra)
    words[words.index("--teacher") + 1] = "shards:4,3"
    words.remove("--debiased-sampling")
    return [*words, "--captions", captions, "--sampling", "random"]


@pytest.mark.parametrize(
    ("ranks", "dga_steps", "batch"),
    [
        (2, 2, 3),
        pytest.param(4, 1, 6, marks=pytest.mark.slow),  # four processes on a core or two
        pytest.param(4, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_both_captions_of_a_picture_in_one_step(place, ranks, dga_steps, batch):
    """As DataCompDR's makers train, under torchrun: the sum of two dense losses, each with its caption's embeddings, where
    samples with one caption or picture share the target."""
    folder, _ = place
    name = f"both{ranks}x{dga_steps}"
    extra = f"--loss-chunk 3 --distill-weight 0.7 --distill-temperature 0.5 --positives both --dga-steps {dga_steps}"
    words = reinforced(
        folder, name, "txt+syn.json:syn_text", *extra.split(), "--batch-size", str(batch)
    )
    steps, printed = recorded(folder, name, words, ranks)
    assert "is that of chance" not in printed
    stored = {
        tuple(unit(embeddings_of(number)["text_emb"][place], 0).tolist()): (number, place)
        for number in range(24)
        for place in range(3)
    }
    for entries, model in steps:
        inputs = [entry["loss_inputs"] for entry in entries]
        assert [one["texts_per_image"] for one in inputs] == [2] * ranks
        teachers = [
            (
                torch.cat([one["teacher_features"][number][0] for one in inputs]).float(),
                set_by_set([one["teacher_features"][number][1] for one in inputs], 2).float(),
            )
            for number in (0, 1)
        ]
        captions, synthetic = (
            [stored[tuple(row.tolist())] for row in rows] for rows in teachers[0][1].half().chunk(2)
        )
        assert [number for number, _ in captions] == [number for number, _ in synthetic]
        assert {place for _, place in captions} == {0} and {place for _, place in synthetic} == {
            1,
            2,
        }
        ids = {
            name: torch.cat([one["ids"][name] for one in inputs]) for name in ("source", "image")
        }
        ids["caption"] = set_by_set([one["ids"]["caption"] for one in inputs], 2)
        inputs = {"teacher_features": teachers, "texts_per_image": 2, "ids": ids}
        dense = DenseLoss(distill_weight=0.7, distill_temperature=0.5, positives="both")
        value, found = gradient_errors(model, entries, dense, **inputs)
        assert max(found) <= 5e-5
        assert all(float(entry["loss"]) == pytest.approx(value, rel=1e-5) for entry in entries)
        assert len(ids["image"].unique()) < len(ids["image"])
        alone = DenseLoss(distill_weight=0.7, distill_temperature=0.5)  # control: no shared targets
        assert min(gradient_errors(model, entries, alone, **inputs)[1]) >= 0.01
        inputs["teacher_features"] = [
            (images, texts.roll(len(texts) // 2, 0)) for images, texts in teachers
        ]
        _, found = gradient_errors(
            model, entries, dense, **inputs
        )  # control: each caption with the other's embeddings
        assert min(found) >= 0.01


def unit(rows, teacher):
    begin = (0, 4)[teacher]
    part = torch.from_numpy(rows.astype("float32"))[begin : begin + (4, 3)[teacher]]
    return torch.nn.functional.normalize(part, dim=0).half()


def test_training_says_what_is_wrong_with_a_teacher_before_it_starts(place, capsys, monkeypatch):
    folder, data = place
    monkeypatch.chdir(folder)
    open_clip.add_model_config(str(folder / "tiny.json"))
    words = arguments_of(folder, data, "refused", "--workers", "0")
    assert main([*words, "--teacher", str(folder / "nowhere")]) == 2
    assert (
        "nowhere holds no embeddings.json; make a folder of embeddings" in capsys.readouterr().err
    )
    words[words.index(AUGMENTED[1])] = "scale=(0.5,1.0)"
    done = launch(
        "ours", folder / "tiny.json", words, cwd=folder, status=2
    )  # open_clip's main logs by then
    assert "was begun with augmentation RandomResizedCrop(" in done.stderr
    assert not (folder / "logs" / "refused").exists()
