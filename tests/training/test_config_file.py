"""`--config FILE`: the flags of a YAML file or of an earlier run's params.txt, before those of the command line."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError
from training.params import parse

RUN = """
lr: 1e-4
debiased-sampling: true
train_data: a=/x::b=/y
ablate: [detached-gather]
freeze: [text]
image-mean: [0.5, 0.5, 0.5]
aug-cfg: {scale: "(0.6,1.0)"}
--lock-text: false
"""
LINE = (
    "--lr 1e-4 --debiased-sampling --train-data a=/x::b=/y --ablate detached-gather --freeze text "
    "--image-mean 0.5 0.5 0.5 --aug-cfg scale=(0.6,1.0)"
)


def test_a_file_of_flags_is_the_command_line_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    args, config = parse(["--config", f"{tmp_path}/run.yaml"])
    assert (args, config) == parse(LINE.split())
    args, _ = parse(["--lr=2e-4", f"--config={tmp_path}/run.yaml"])
    assert args.lr == 2e-4 and args.image_mean == [0.5, 0.5, 0.5]


def test_the_params_of_a_run_are_a_file_of_flags(tmp_path):
    """As open_clip writes them: each entry, those included that no flag gives."""
    args, _ = parse([*LINE.split(), "--token-drop", "0.25", "--device", "cuda"])
    args.device, args.resume, args.world_size = "cuda:3", "logs/x/checkpoints/epoch_1.pt", 4
    lines = [f"{name}: {value}\n" for name, value in sorted(vars(args).items())]
    (tmp_path / "params.txt").write_text("".join(lines))
    again, config = parse(["--config", f"{tmp_path}/params.txt", "--epochs", "7"])
    changed = {name for name, value in vars(again).items() if value != getattr(args, name)}
    assert changed == {"device", "resume", "epochs"} and again.device == "cuda"
    assert config.token_drop == 0.25 and config.sampling == "debiased"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dga-step: 4", "there is no flag --dga-step; did you mean --dga-steps?"),
        ("- lr", "is not a table of flags"),
        ("lr: [", "cannot be read"),
        ("dga-steps: 0", "--dga-steps 0 is out of range"),
    ],
)
def test_a_file_of_other_things_is_refused(tmp_path, text, words):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        parse(["--config", f"{tmp_path}/run.yaml"])
