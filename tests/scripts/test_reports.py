"""The table, the picture and the reading of open_clip's training log."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.retrieval.examples import retrieval_examples
from open_clip_zerovl.report.plot import moving_average
from scripts.emoji.picture import demo_picture
from scripts.emoji.records import RunRecord, read_training_log, results_table


def record(**change) -> RunRecord:
    values = {
        "loss_curve": [(64 * i, 4.0 / i) for i in range(1, 50)],
        "rsum": {"within": 283.25, "across": 221.0, "mixed": 211.0},
        "probe_images": 0.63,
        "probe_texts": 0.58,
        "probe_chance": 0.25,
        "log_p_same_source": -26.1,
        "log_p_other_source": -33.4,
    }
    return RunRecord(**{**values, **change})


LOG = """\
2026-11-20,19:00:00 | INFO | Running in distributed mode
2026-11-20,19:00:01 | INFO | Train Epoch: 0 [  64/5703 (1%)] Data (t): 0.1 Batch (t): 0.2, 310.0/s, 310.0/s/gpu LR: 0.000100 \
Logit Scale: 50.000 Contrastive_loss: 4.1589 (4.2000) Loss: 4.1590 (4.2000)
2026-11-20,19:00:09 | INFO | Train Epoch: 0 [5703/5703 (100%)] Data (t): 0.1 LR: 0.000100 Logit Scale: 50.0 Loss: 2.5000 (3.0)
2026-11-20,19:00:19 | INFO | Train Epoch: 1 [  64/5703 (1%)] Data (t): 0.1 LR: 0.000100 Logit Scale: 50.000 Loss: nan (nan)
2026-11-20,19:00:29 | INFO | Train Epoch: 1 [  64/5703 (1%)] Data (t): 0.1 LR: 0.000100 Logit Scale: 50.000 Loss: 1.5e-05 (2.0)
2026-11-20,19:00:30 | INFO | Eval Epoch: 1 Loss: 9.0000 (9.0)
"""


def test_a_training_log_of_open_clip_is_read(tmp_path):
    (tmp_path / "out.log").write_text(LOG)
    # The total "Loss", not the part "Contrastive_loss"; a step repeated after a resume counts once, as it was last.
    assert read_training_log(tmp_path / "out.log") == [(64, 4.159), (5703, 2.5), (5767, 1.5e-05)]


def test_a_diverged_step_is_kept(tmp_path):
    (tmp_path / "out.log").write_text("".join(LOG.splitlines(keepends=True)[:4]))
    assert math.isnan(read_training_log(tmp_path / "out.log")[-1][1])


def test_a_log_without_steps_is_named(tmp_path):
    (tmp_path / "out.log").write_text("nothing here\n")
    with pytest.raises(UserError, match="no step was logged"):
        read_training_log(tmp_path / "out.log")
    with pytest.raises(UserError, match="there is no training log"):
        read_training_log(tmp_path / "absent.log")


def test_the_log_format_is_the_one_that_open_clip_writes():
    """open_clip_train formats the line inside its loop, so its source is what can be held against."""
    train = pytest.importorskip("open_clip_train.train")
    source = Path(train.__file__).read_text(encoding="utf-8")
    assert 'f"Train Epoch: {epoch} [{num_samples:>{sample_digits}}/{samples_per_epoch} ' in source
    # 3.3: "{loss_name.capitalize()}: {loss_m.val:#.5g} ({loss_m.avg:#.5g})"; 4 breaks the same line after the value
    assert re.search(r'\{(loss_)?name\.capitalize\(\)\}: \{(loss_)?m\.val:#\.5g\} ("\s+f")?\(\{', source)


def test_the_table_lines_up_and_holds_every_number():
    runs = {"random": record(), "debiased, longer": record(probe_texts=0.345, log_p_other_source=-129.126)}
    text = results_table(runs)
    lines = text.splitlines()
    assert len(lines) == 4
    for value in ("283.2", "221.0", "211.0", "63.0 %", "34.5 %", "-26.10", "-129.13"):
        assert value in text
    ends = [
        line.rindex(cell) + len(cell)
        for line, cell in zip(lines[1:], ("other source", "-33.40", "-129.13"), strict=True)
    ]
    assert len(set(ends)) == 1
    assert lines[0].index("RSUM") > lines[1].index("within") - 1
    markdown = results_table(runs, markdown=True).splitlines()
    assert len({len(line) for line in markdown}) == 1 and all(line.count("|") == 9 for line in markdown)
    with pytest.raises(UserError, match="at least one run"):
        results_table({})


def pool(count=12):
    generator = torch.Generator().manual_seed(0)
    texts = F.normalize(torch.randn(count, 8, generator=generator), dim=-1)
    pictures = [np.full((16, 16, 3), 20 * i, dtype=np.uint8) for i in range(count)]
    return pictures, [f"caption {i} " * (1 + 5 * i) for i in range(count)], ["a", "b"] * (count // 2), texts


def test_examples_hold_the_best_pictures_and_the_rank():
    pictures, captions, sources, texts = pool()
    shifted = texts.roll(1, dims=0)  # here picture i matches caption i - 1
    good, bad = retrieval_examples(
        pictures, captions, sources, {"x": (texts, texts), "y": (shifted, texts)}, [3, 4], k=3
    )
    assert good.rank["x"] == 1 and [picture.right for picture in good.top["x"]] == [True, False, False]
    assert (good.query, good.source) == (captions[3], "b") and len(good.top["y"]) == 3
    scores = shifted @ texts[4]
    assert bad.rank["y"] == 1 + int((scores > scores[4]).sum()) > 1
    assert int(bad.top["y"][0].pixels[0, 0, 0]) == 20 * int(scores.argmax())


@pytest.mark.parametrize("names", [("only",), ("random", "debiased"), ("a", "b", "c")])
def test_the_picture_is_drawn(tmp_path, names):
    pytest.importorskip("matplotlib")
    from PIL import Image

    pictures, captions, sources, texts = pool()
    examples = retrieval_examples(pictures, captions, sources, dict.fromkeys(names, (texts, texts)), [0, 11])
    path = demo_picture(tmp_path / "new" / "demo.png", {name: record() for name in names}, examples, width_px=800)
    with Image.open(path) as image:
        assert image.width == 800 and len(image.convert("RGB").getcolors(1 << 24)) > 50
    again = demo_picture(tmp_path / "again.png", {name: record() for name in names}, examples, width_px=800)
    assert again.read_bytes() == path.read_bytes()


def test_the_picture_refuses_what_it_cannot_show(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="1 to 5 runs, got 0"):
        demo_picture(tmp_path / "x.png", {})
    pictures, captions, sources, texts = pool()
    examples = retrieval_examples(pictures, captions, sources, {"a": (texts, texts)}, [0])
    with pytest.raises(UserError, match="has no pictures of run b"):
        demo_picture(tmp_path / "x.png", {"a": record(), "b": record()}, examples)


def test_a_moving_average_takes_fewer_neighbours_at_the_ends_and_leaves_out_what_diverged():
    assert moving_average(np.array([1.0, 2, 6]), 1).tolist() == [1.5, 3, 4]
    assert moving_average(np.array([1.0]), 3).tolist() == [1]
    found = moving_average(np.array([1.0, np.nan, 3, np.inf, np.nan, np.nan]), 1)
    np.testing.assert_array_equal(found, [1, 2, 3, 3, np.nan, np.nan])
