"""Odd input to every command ends in one sentence and status 2, not in a traceback, and not after work that is then lost.

Misspelt words, lines before a wait, shell completion.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

import open_clip_zerovl as package
from open_clip_zerovl import cli as program
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.flags import parameters_of
from open_clip_zerovl.recipe.flags import TuningFlags
from support.tars import png, write_source, write_tar
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_retrieval_set,
    write_run,
)


def bomb() -> bytes:
    """A small PNG that claims 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 300_000))
        + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with good inputs and many odd ones, see ODD."""
    home = tmp_path_factory.mktemp("odd")
    name = register(home / "configs", "odd-clip", NATIVE_VISION, CLIP_TEXT)
    run = write_run(home / "run", random_model(name), {"model": name})
    exported = export_local_dir(run, home / "exp")
    write_retrieval_set(home / "set", [1, 2, 1])
    write_source(home / "a", 0, 12, 6)
    write_source(home / "b", 100, 12, 6)
    (home / "file").write_text("x")
    (home / "full").symlink_to("/dev/full")
    for label in ("red", "blue"):
        for i in range(3):
            write_file(
                home / "probe" / label / f"{i}.png", png((9 * i, 50, 200 * (label == "blue")))
            )
    shutil.copytree(home / "probe", home / "bombprobe")
    write_file(home / "bombprobe" / "red" / "0.png", bomb())

    write_tar(home / "bomb" / "0.tar", [("k.png", bomb()), ("k.txt", b"x")])
    write_tar(home / "latin" / "0.tar", [("k.png", png((1, 2, 3))), ("k.txt", b"\xe9")])
    write_file(home / "notatar" / "00000.tar", b"hello" * 300)
    write_file(home / "notatar" / "sizes.json", b'{"00000.tar": 3}')
    shutil.copytree(home / "a", home / "binarysizes")
    write_file(home / "binarysizes" / "sizes.json", b"\xff\xfe\0")
    shutil.copytree(home / "a", home / "flatmanifest")
    write_file(home / "flatmanifest" / "manifest.json", b'{"shards": {"00000.tar": 3}}')
    write_file(home / "karpathy.json", b'{"images": [1, 2]}')
    shutil.copytree(home / "run", home / "oddparams")
    write_file(home / "oddparams" / "params.txt", b"model: odd-clip\nimage_mean: 3\n")
    for folder, mean in (("wordymean", "x"), ("shortmean", [0.5])):
        shutil.copytree(exported, home / folder)
        config = json.loads((home / folder / "open_clip_config.json").read_text())
        config["preprocess_cfg"]["mean"] = mean
        (home / folder / "open_clip_config.json").write_text(json.dumps(config))
    shutil.copytree(exported, home / "cutweights")
    write_file(home / "cutweights" / "open_clip_model.safetensors", b"abc")
    return home


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


SCORE = "retrieval exp --data set"
PROBE = "linear-probe exp --train probe --test probe --out"
ZERO = "zero-shot exp --data"
EPOCH = "checkpoints/epoch_1.pt"
ODD = {
    # where results go
    f"{SCORE} --output file/x.json": r"file/x\.json cannot be written",
    f"{SCORE} --output full": "No space left on device",
    f"{SCORE} --gallery a": r"a cannot be written \(Is a directory\)",
    f"{PROBE} file": "file cannot be written",
    f"{ZERO} probe --output file/x.json": r"file/x\.json cannot be written",
    f"{ZERO} bombprobe": "too large to decode",
    f"{ZERO} notatar": "not a readable, uncompressed tar|is not a folder of class folders",
    f"{ZERO} probe --template photo": "is no file and has no place for the class",
    f"{ZERO} probe --class-names karpathy.json": "does not name the 2 classes",
    f"export run/{EPOCH} file/x": r"cannot be written",
    f"export run/{EPOCH} file": "is not an earlier export",
    f"export run/{EPOCH}": "a folder to write is missing",
    # models
    "retrieval wordymean --data set": "give mean and std of three numbers",
    "retrieval shortmean --data set": "give mean and std of three numbers",
    "retrieval cutweights --data set": "cutweights cannot be read .*[Hh]eader.*give a folder",
    "retrieval file --data set": "file cannot be read",
    "retrieval /dev/zero --data set": "is not a model; give a folder",
    f"export oddparams/{EPOCH} out": r"params\.txt of .* cannot be read",
    # data
    "retrieval exp --data bomb": "too large to decode",
    "retrieval exp --data latin": "is not UTF-8",
    "retrieval exp --data karpathy.json": "it lacks 'annotations'",
    "linear-probe exp --train bombprobe --test probe --out p1": "the image of sample .0.png. cannot be read",
    "linear-probe exp --train notatar --test probe --out p2": "is not a readable",
    "data check binarysizes": "sizes.json cannot be read .*to have the shards counted",
    "data check flatmanifest": "was not written by this program",
    "data check notatar --sizes": "is broken",
    "data public cc3m --out d1 --source file": "is not a list of captions",
    "data public coco --out d2 --source karpathy.json": "does not have the form of Karpathy's images",
    # flags that the way taken does not read
    f"{ZERO} probe --label json:x": "--label json:x is for shards",
    f"{ZERO} probe --split train": "has no split 'train'",
    f"{PROBE} q1 --label json:x": "--label json:x is for shards",
    # numbers
    f"{SCORE} --batch-size 0": "--batch-size 0 is out of range; give at least 1",
    "trial --from exp --data a --out t --seeds 1": "--seeds 1 is out of range; give at least 2",
    f"{SCORE} --workers -1": "--workers -1 is out of range; give 0 or more",
    f"{SCORE} --device foo": "the device 'foo' cannot be used",
    f"{SCORE} --device meta": "the device 'meta' cannot be used",
}


@pytest.mark.parametrize("command", ODD, ids=lambda command: command[:60])
def test_odd_input_ends_in_a_sentence(home, command, monkeypatch, capsys):
    monkeypatch.chdir(home)
    if "cannot be written" in ODD[command]:  # is said before the work
        loading = "open_clip_zerovl.checkpoints.loading.load_model"
        monkeypatch.setattr(loading, lambda *_, **__: pytest.fail("loaded the model first"))
    status = main(command.split())
    said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert status == 2 and len(said) == 1 and len(said[0]) < 1500
    assert re.search(ODD[command], said[0]), said[0]


SOURCES = "".join(
    file.read_text()
    for file in Path(package.__file__).parent.rglob("*.py")
    if file.name != "flags.py"
)


@pytest.mark.parametrize("command", sorted(set(program.ALL) - set(program.TAKE_WORDS)))
def test_every_flag_has_a_reader(command):
    """The rows above hold the flags that one way of a command reads and another refuses; `training/test_every_flag` train's."""
    function = inspect.unwrap(program.function_of(command))
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    read = {
        node.id for line in definition.body for node in ast.walk(line) if isinstance(node, ast.Name)
    }
    for parameter in parameters_of(function):
        assert parameter.name in read, parameter.name
        assert parameter.flags[0].metavar or not parameter.positional, parameter.name
        for flag in parameter.flags if parameter.section not in (None, TuningFlags) else ():
            assert re.search(rf"\.{flag.name}\b|\b{flag.name}=", SOURCES), flag.name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("pack x --out y", "there is no command 'pack'; did you mean `zerovl data pack`?"),
        ("retreival m", "there is no command 'retreival'; did you mean `zerovl retrieval`?"),
        ("data pak x", "there is no command 'pak'; did you mean `zerovl data pack`?"),
        ("quux", "there is no command 'quux'; `zerovl --help` lists the commands"),
        (
            "data pack x --out y --test-shar 0.1",
            "there is no flag --test-shar; did you mean --test-share?",
        ),
        (
            "search a b c d --zzzz",
            "there is no flag --zzzz; `zerovl search --help` lists the flags",
        ),
        ("export a b c=d", "unrecognized arguments: c=d; `zerovl export --help` lists the flags"),
        (
            "retrieval",
            "the following arguments are required: [NAME=]MODEL, --data; `zerovl retrieval --help` lists the flags",
        ),
        ("", "`zerovl` needs a command; `zerovl --help` lists the commands"),
        (
            "--verison",
            "`zerovl` needs a command, and --verison is not one; `zerovl --help` lists the commands",
        ),
        ("data", "`zerovl data` needs a command; `zerovl data --help` lists the commands"),
        ("data nosuch", "there is no command 'nosuch'; `zerovl data --help` lists the commands"),
    ],
)
def test_a_misspelt_command_or_flag_gets_one_sentence_with_the_nearest(capsys, line, sentence):
    """Abbreviated flags are refused: else --test-shar would mean --test-share until another flag has the same prefix."""
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"zerovl: error: {sentence}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("zerovl al", {"align"}),
        ("zerovl data ch", {"check"}),
        ("zerovl align --data D --batch", {"--batch-size"}),
        ("zerovl train --batch-size 64 --dga-s", {"--dga-steps"}),
        ("zerovl trial --equal ", {"time", "samples"}),
    ],
)
def test_the_words_that_may_follow(tmp_path, line, words):
    """As the shell function of argcomplete asks for it."""
    pytest.importorskip("argcomplete", reason="pip install '.[shell]'")
    request = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    command = [sys.executable, "-m", "open_clip_zerovl.cli"]
    subprocess.run(command, env={**os.environ, **request}, check=True, timeout=60)
    assert set((tmp_path / "words").read_text().split()) == words
