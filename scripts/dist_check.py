"""`make dist-check`: the wheel as a user gets it, not the checkout.

    build      sdist, and the wheel from the sdist
    contents   the files of `src/`, and nothing else
    install    the wheel into an empty environment, without an index: pip finds each declared requirement, or fails
    use        from another folder: zerovl, the training program's help, steps of training, the export of the result

The environment holds this environment's copies of the packages that the wheel requires, directly or indirectly, as links:
5 GB less to download. A package that is installed here but not required is not in it, so that an undeclared import fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated as A

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from open_clip_zerovl import __version__
from open_clip_zerovl.core.errors import UserError
from scripts.program import program

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "open_clip_zerovl"
PAIRS, MICRO_BATCH, DGA_STEPS = 16, 4, 2  # of each of two sources: four steps an epoch


def check(*, out: A[Path, "where wheel and sdist go", "DIR"] = ROOT / "dist") -> None:
    """Check all of it, with a line for each part.

    Raises:
        UserError: a part failed; the sentence ends in the output of its command.
    """
    start = time.monotonic()

    def done(part: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {part}", flush=True)

    wheel = build(out.resolve())
    done(f"built {wheel.name} ({wheel.stat().st_size >> 10} KiB)")
    check_contents(wheel)
    done("contents: the files of src/")
    with tempfile.TemporaryDirectory(prefix="zerovl-dist-") as scratch:
        python = install(wheel, Path(scratch, "env"))
        done("installed into an empty environment; pip check")
        use(python, Path(scratch, "elsewhere"))
    done("used from another folder: zerovl, training, export")


def build(out: Path) -> Path:
    """Build the sdist, and the wheel from it, into `out`, and return the wheel."""
    for old in [*out.glob(f"{PACKAGE}-*.whl"), *out.glob(f"{PACKAGE}-*.tar.gz")]:
        old.unlink()
    output([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)])
    found = list(out.glob(f"{PACKAGE}-{__version__}-*.whl"))
    if len(found) != 1:
        raise UserError(
            f"{out} should hold one wheel of {__version__}, but holds {sorted(os.listdir(out))}"
        )
    return found[0]


def check_contents(wheel: Path) -> None:
    """Compare the wheel's files with those of the checkout's `src/`."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    src = ROOT / "src"
    kinds = ("*.py", "*.json", "*.j2", "*.html", "*.css", "py.typed")
    wanted = {file.relative_to(src).as_posix() for kind in kinds for file in src.rglob(kind)}
    if inside != wanted:
        raise UserError(
            f"{wheel.name} lacks {sorted(wanted - inside)}, and holds {sorted(inside - wanted)} besides"
        )


def required(distribution: str) -> dict[str, metadata.Distribution]:
    """Find all installed distributions that a distribution requires, directly or indirectly, without itself.

    Raises:
        UserError: a required one is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    todo, seen = [(canonicalize_name(distribution), "")], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise UserError(f"{name} is required, but not installed here; make install") from error
        for needed in map(Requirement, found[name].requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [
                    (canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras)
                ]
    del found[canonicalize_name(distribution)]
    return found


def install(wheel: Path, env: Path) -> Path:
    """Install into a new environment with links to the required packages only, and return its Python."""
    venv.create(env, symlinks=True)
    python = env / "bin" / "python"
    site = Path(
        output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        ).strip()
    )
    home = Path(sysconfig.get_path("purelib"))
    for distribution in required(
        PACKAGE
    ).values():  # links to its files and folders, without scripts
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(home / top)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    output([*pip, "install", "--no-index", "--quiet", str(wheel)])
    output([*pip, "check"])
    return python


def use(python: Path, folder: Path) -> None:
    """Run the commands of a user, in a folder that is not the checkout."""
    folder.mkdir()
    zerovl = str(python.with_name("zerovl"))
    shown = output([zerovl, "--version"], folder).strip()
    if shown != f"{PACKAGE} {__version__}":
        raise UserError(f"zerovl --version prints {shown!r} instead of {PACKAGE} {__version__}")
    output([zerovl, "--help"], folder)
    program = [str(python), "-m", "training.main"]
    if "--dga-steps" not in output([*program, "--help"], folder):
        raise UserError("python -m training.main --help does not name --dga-steps")
    output([str(python), "-c", MAKE_DATA, str(PAIRS)], folder)
    command = (
        "--model zerovl-emoji-vit --text-model bert --train-data one=one.csv::two=two.csv --debiased-sampling --batch-size "
        f"{MICRO_BATCH} --dga-steps {DGA_STEPS} --name run --epochs 1 --workers 1 --device cpu --precision fp32 --warmup 1"
    ).split()
    output([*program, *command], folder)
    output([zerovl, "export", "logs/run/checkpoints/epoch_1.pt", "exported"], folder)
    output([str(python), "-c", LOOK_AT, str(ROOT)], folder)


# Two sources of pictures in one colour, and BERT's config and tokenizer, as a user without a model hub has them.
MAKE_DATA = """
import sys
from pathlib import Path
from PIL import Image
from transformers import BertConfig, BertTokenizer

pairs = int(sys.argv[1])
for source in ("one", "two"):
    rows = ["filepath\\ttitle"]
    for i in range(pairs):
        Image.new("RGB", (40, 36), (7 * i, 90, 200 * (source == "two"))).save(f"{source}-{i}.png")
        rows.append(f"{source}-{i}.png\\ta picture {i}")
    Path(f"{source}.csv").write_text("\\n".join(rows) + "\\n")
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "picture", *map(str, range(pairs))]
Path("vocab.txt").write_text("\\n".join(words) + "\\n")
BertTokenizer(vocab="vocab.txt").save_pretrained("bert")
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BertConfig(vocab_size=len(words), **sizes).save_pretrained("bert")
"""

# Our packages come from the environment, typed, and the export loads in stock open_clip.
LOOK_AT = """
import importlib.util
import os
import sys
from importlib import resources

import open_clip
import open_clip_zerovl
import open_clip_zerovl.models
from open_clip_zerovl.dga import DecoupledGradientAccumulation

for name in ("open_clip_zerovl", "training"):
    place = importlib.util.find_spec(name).origin
    assert place.startswith(sys.prefix) and not place.startswith(sys.argv[1]), place
assert resources.files("open_clip_zerovl").joinpath("py.typed").is_file()
assert "zerovl-ViT-B-16-BERT-base" in open_clip.list_models()
open_clip.create_model_and_transforms("local-dir:" + os.path.abspath("exported"))
"""


def output(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command as a user, with nothing that leads to the checkout and no hub, and return its output.

    Raises:
        UserError: it failed; its last lines are on standard error.
    """
    variables = {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "ZEROVL_")) and name not in variables
    }
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        print(*(done.stdout + done.stderr).strip().splitlines()[-40:], sep="\n", file=sys.stderr)
        raise UserError(f"this command ended with {done.returncode}: {' '.join(command)[:300]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(program(check))
