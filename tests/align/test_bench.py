"""The benchmark's bound: a step of ours makes the matrix products that no step can leave out, and no other."""

from __future__ import annotations

import json

import torch
from torch.utils.flop_counter import FlopCounterMode

from open_clip_zerovl.align.heads import Heads
from open_clip_zerovl.align.train import take_step
from open_clip_zerovl.losses import ContrastiveLoss
from scripts.bench import align as bench


def _in_place(_, left, right, **__):
    """Operations of `addmm_`, which torch's counter passes over."""
    return 2 * left[0] * left[1] * right[1]


def test_a_step_makes_the_products_of_the_bound_and_no_other():
    heads, rows = Heads((16, 8), 8), [torch.randn(32, 16), torch.randn(32, 8)]
    counted = {}
    for name in ("products", "ours"):
        with FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: _in_place}
        ) as seen:
            if name == "products":
                bench.matrix_products(heads, rows)
            else:
                optimizer = torch.optim.AdamW(heads.parameters(), fused=True)
                take_step(heads, optimizer, ContrastiveLoss(), rows, {})
        counted[name] = seen.get_total_flops()
    # 4 F D a row in the heads, 6 N D in the loss
    assert counted["ours"] == counted["products"] == 4 * 24 * 8 * 32 + 6 * 32**2 * 8


def test_it_times_the_three_ways(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    bench.main(
        [
            "--batches",
            "32",
            "--widths",
            "16,8,8",
            "--rounds",
            "1",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "o.json"),
        ]
    )
    rows = json.loads((tmp_path / "o.json").read_text())["align"]
    assert [row["way"] for row in rows] == ["products", "ours", "plain"] and rows[0][
        "of_the_products"
    ] == 1.0
    assert all(row["pairs_per_second"] > 0 and row["peak_mib"] > 0 for row in rows)
    assert "| batch | way |" in capsys.readouterr().out
