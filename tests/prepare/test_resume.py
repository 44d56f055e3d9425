"""A call that is killed at any moment continues where it stopped, and ends with the bytes of an undisturbed call."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from open_clip_zerovl.core import files as claim_module
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked
from open_clip_zerovl.prepare import pack as packing
from open_clip_zerovl.prepare.collect import Collecting
from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.settings import Columns, PackSettings, Work
from open_clip_zerovl.shards import files as writing
from support.pairs import Pair, as_csv, as_folder, make_pairs, shards_of
from support.servers import HostileServer
from support.tars import encoded

WORK = Work(threads=2, progress=False)
SETTINGS = PackSettings(
    test_share=0.2, shard_size=5, max_side_px=20, columns=Columns(source="kind")
)


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


def kill_in(patch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Let a function end in `Killed` at all calls from number `call` on, counted from 0."""
    calls, original = itertools.count(), getattr(module, name)

    def killed(*arguments, **options):
        if next(calls) >= call:
            raise Killed
        return original(*arguments, **options)

    patch.setattr(module, name, killed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A table of 30 pairs, and the files that one call makes of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    given = as_csv(folder / "in", make_pairs(30))
    pack([str(given)], folder / "out", SETTINGS, work=WORK)
    return given, _files(folder / "out")


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (Collecting, "_submit", 7),
        (Collecting, "_take", 20),
        (packing, "write_shard", 0),
        (packing, "write_shard", 3),
        (packing, "sha256_of", 2),
        (packing, "_write_manifest", 1),
        (writing, "write_atomically", 0),
        (packing.reports, "write_refused", 0),
        (packing, "write_atomically", 0),
        (claim_module, "write_atomically", 0),
        (packing.shutil, "rmtree", 0),
    ],
)
def test_a_kill_at_any_step_is_mended(module, name, call, undisturbed, tmp_path, monkeypatch):
    given, wanted = undisturbed
    with monkeypatch.context() as patch:
        kill_in(patch, module, name, call)
        with pytest.raises(Killed):
            pack([str(given)], tmp_path / "out", SETTINGS, work=WORK)
    pack([str(given)], tmp_path / "out", SETTINGS, work=WORK)
    assert _files(tmp_path / "out") == wanted


def _files(out: Path) -> dict[str, bytes]:
    """All of an output but the page and report, which name its folder."""
    return {
        str(file.relative_to(out)): file.read_bytes()
        for file in out.rglob("*")
        if file.is_file() and file.name not in ("report.html", "lock") and ".pack" not in file.parts
    }


def test_a_retry_that_is_killed_is_mended_by_any_call(packed, tmp_path, monkeypatch):
    """The shards of the first call are written anew, from more samples; none of the old ones is taken for a new one."""
    with HostileServer() as server:
        kinds = ["flaky" if number % 4 == 1 else "good" for number in range(24)]
        rows = [
            "url,caption",
            *(f"{server.url(kind, n)},caption {n}" for n, kind in enumerate(kinds)),
        ]
        (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
        given, settings = tmp_path / "list.csv", {"test_share": 0.2, "shard_size": 4}
        once = Work(threads=2, attempts=1, progress=False)
        first = packed(given, work=once, **settings)
        assert first["pictures"] == 18 and first["refused"]["http 503"]["rows"] == 6
        with monkeypatch.context() as patch:
            kill_in(patch, packing, "write_shard", 2)
            with pytest.raises(Killed):
                packed(given, work=replace(once, retry_failed=True), **settings)
        assert packed(given, work=once, **settings)["pictures"] == 24
        packed(given, out="whole/out", work=once, **settings)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole/out")


OPENED: Counter[str] = Counter()
sys.addaudithook(lambda event, words: event == "open" and OPENED.update([str(words[0])]))


@pytest.mark.parametrize("form", [as_folder, as_csv])
def test_a_call_opens_each_picture_once_and_refuses_one_that_has_changed(
    form, packed, tmp_path, monkeypatch
):
    """One of them is turned by EXIF; the calls are a first one, one after a kill, and one after the end."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.new("RGB", (40, 20), "red"), "JPEG", exif=exif)
    pairs = [Pair("a/0.jpg", turned, ["turned"], "x"), *make_pairs(20)]
    given, settings = form(tmp_path / "in", pairs), {"test_share": 0.2, "shard_size": 4}
    pictures = {str(tmp_path / "in" / pair.name): pair.content for pair in pairs}

    def opened() -> list[int]:
        counts = [OPENED[name] for name in pictures]
        OPENED.clear()
        return counts

    OPENED.clear()
    with monkeypatch.context() as patch:
        kill_in(patch, Collecting, "_take", 11)
        with pytest.raises(Killed):
            packed(given, **settings)
    assert max(opened()) == 1
    changed = next(iter(pictures))
    Path(changed).write_bytes(encoded(Image.new("RGB", (40, 20), "blue"), "JPEG", exif=exif))
    with pytest.raises(UserError, match=r"out was begun before .*a/0\.jpg changed; repeat"):
        packed(given, **settings)
    Path(changed).write_bytes(pictures[changed])
    OPENED.clear()
    for _ in range(2):
        assert packed(given, **settings)["sizes"]["turned"] == 1
        assert opened() == [1] * len(pictures)
    assert packed(given, out="whole/out", **settings)["pictures"] == 21
    assert opened() == [1] * len(pictures)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole/out")


def test_threads_do_not_change_the_bytes(undisturbed, tmp_path):
    given, wanted = undisturbed
    pack([str(given)], tmp_path / "out", SETTINGS, work=Work(threads=8, progress=False))
    assert _files(tmp_path / "out") == wanted


def test_one_process_writes_a_folder(packed, tmp_path, monkeypatch):
    given = as_csv(tmp_path / "in", make_pairs(6))
    with monkeypatch.context() as patch:
        kill_in(patch, packing.reports, "summarize", 0)
        with pytest.raises(Killed):
            packed(given)
    held = locked(tmp_path / "out/.pack", name=packing._LOCK)
    with held, pytest.raises(UserError, match=r"Another process is writing .*out: wait for it\."):
        packed(given)


def test_a_picture_that_the_page_cannot_show_does_not_end_the_call(tmp_path, monkeypatch):
    """Found by the fuzzer: a decoder may refuse damaged bytes that it took before."""

    def refused(_: Image.Image) -> Image.Image:
        raise OSError("broken data stream")

    monkeypatch.setattr("open_clip_zerovl.prepare.report.as_shown", refused)
    given = as_csv(tmp_path / "in", make_pairs(3))
    pack([str(given)], tmp_path / "out", PackSettings(), work=WORK)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure><figcaption>") == 3
