"""`--copy-codebase`: the packages that train, and nothing of the environment around them."""

from argparse import Namespace

import open_clip
import open_clip_train.main as host

import open_clip_zerovl
from training.codebase import PACKAGES, copy_codebase, copy_of_run
from training.seams import check_host


def test_the_packages_that_train_are_copied_once(tmp_path):
    code = copy_codebase(tmp_path / "run")
    assert sorted(path.name for path in code.iterdir()) == sorted(PACKAGES)
    for package, name in ((open_clip_zerovl, "open_clip_zerovl/core/errors.py"), (open_clip, "open_clip/model.py")):
        original = (code.parent / package.__file__).parent.parent / name
        assert (code / name).read_bytes() == original.read_bytes()
    assert list(code.rglob("model_configs/*.json")) and not list(code.rglob("__pycache__"))
    (code / "training" / "mark").write_text("kept")
    copy_codebase(tmp_path / "run")  # resumed
    assert (code / "training" / "mark").read_text() == "kept"


def test_main_copies_by_our_function_on_its_first_rank(tmp_path):
    """open_clip's own copies the folder three levels above its main: of an installed package the environment."""
    assert "copy_codebase" in check_host().SEAMS and "copy_codebase" in host.main.__code__.co_names
    args = Namespace(logs=str(tmp_path), name="run", rank=1)
    copy_of_run(args)
    assert not (tmp_path / "run").exists()
    args.rank = 0
    copy_of_run(args)
    assert (tmp_path / "run" / "code" / "training" / "main.py").is_file()
