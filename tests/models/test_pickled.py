"""NumPy's numbers in a checkpoint are loaded, anything that runs code is not."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch

from open_clip_zerovl.models.tower_weights import load_pickled


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float64, np.bool_])
@pytest.mark.parametrize("name", ["numpy._core", "numpy.core"])
def test_numbers_of_numpy_are_loaded(tmp_path, kind, name):
    """As open_clip before 3 wrote them; NumPy 1 had another name for their maker."""
    torch.save({"epoch": kind(1), "state_dict": {"w": torch.ones(2)}}, tmp_path / "new.pt")
    content = (tmp_path / "new.pt").read_bytes()
    if name == "numpy.core":
        torch.save(
            {"epoch": kind(1), "state_dict": {"w": torch.ones(2)}},
            tmp_path / "new.pt",
            _use_new_zipfile_serialization=False,
        )
        content = (tmp_path / "new.pt").read_bytes()
        content = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (tmp_path / "new.pt").write_bytes(content)
    loaded = load_pickled(tmp_path / "new.pt")
    assert loaded["epoch"] == 1 and torch.equal(loaded["state_dict"]["w"], torch.ones(2))


class Runs:
    def __reduce__(self):
        return os.getcwd, ()


def test_code_is_refused(tmp_path):
    torch.save({"epoch": Runs()}, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError, match="getcwd"):
        load_pickled(tmp_path / "bad.pt")
