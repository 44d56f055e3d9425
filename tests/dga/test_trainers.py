"""The documented examples for trainers of other libraries, in one process and in two, against one graph (fp64, 1e-10)."""

import importlib.util
from pathlib import Path

import pytest

from support.programs import run_ranks

PROGRAM = str(Path(__file__).with_name("trainers.py"))
LIBRARIES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "clip": "accelerate",
    "siglip2": "accelerate",
}


@pytest.mark.slow  # importing a trainer takes up to 7 seconds; CI's job `trainers` runs it. `dga.loss` itself: test_step.py
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("example", LIBRARIES)
def test_the_weights_are_those_of_one_graph(example, ranks):
    if importlib.util.find_spec(LIBRARIES[example]) is None:
        pytest.skip(f"{LIBRARIES[example]} is not installed: pip install '.[trainers]'")
    run_ranks(ranks, PROGRAM, example)
