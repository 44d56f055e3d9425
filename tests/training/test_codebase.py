"""`--copy-codebase`: the packages that train, and nothing of the environment around them."""

import open_clip

import open_clip_zerovl
from training.codebase import PACKAGES, copy_codebase


def test_the_packages_that_train_are_copied_once(tmp_path):
    code = copy_codebase(tmp_path / "run")
    assert sorted(path.name for path in code.iterdir()) == sorted(PACKAGES)
    for package, name in ((open_clip_zerovl, "open_clip_zerovl/errors.py"), (open_clip, "open_clip/model.py")):
        original = (code.parent / package.__file__).parent.parent / name
        assert (code / name).read_bytes() == original.read_bytes()
    assert list(code.rglob("model_configs/*.json")) and not list(code.rglob("__pycache__"))
    (code / "training" / "mark").write_text("kept")
    copy_codebase(tmp_path / "run")  # resumed
    assert (code / "training" / "mark").read_text() == "kept"
