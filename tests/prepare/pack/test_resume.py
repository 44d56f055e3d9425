"""A call that is killed at any moment goes on where it stopped, and ends with the bytes of one that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack import collect, run, write
from open_clip_zerovl.prepare.pack.rows import Columns
from open_clip_zerovl.prepare.pack.run import PackSettings, pack
from open_clip_zerovl.prepare.public.gather import Gathering, Work
from open_clip_zerovl.prepare.public.manifest import sole_writer
from support.hostile_server import hostile_server
from support.pairs import as_csv, as_folder, make_pairs, picture, shards_of

WORK = Work(threads=2, progress=False)
SETTINGS = PackSettings(test_share=0.2, shard_size=5, max_side_px=20, columns=Columns(source="kind"))


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


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
        (Gathering, "_finish", 1),
        (Gathering, "_take", 20),
        (write.manifest, "write_recorded_shard", 0),
        (write.manifest, "write_recorded_shard", 3),
        (write.manifest, "write_record", 2),
        (write, "write_atomically", 0),
        (run.reports, "write_refused", 0),
        (run, "write_atomically", 2),
        (run.shutil, "rmtree", 0),
    ],
)
def test_a_kill_at_any_step_is_mended(module, name, call, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "PICTURES_A_SPOOL", 7)
    given, wanted = undisturbed
    calls, original = [0], getattr(module, name)

    def killed(*arguments, **options):
        calls[0] += 1
        if calls[0] > call:
            raise Killed
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
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


@pytest.mark.slow  # a process that is killed; test_a_kill_at_any_step_is_mended holds its shards
def test_pictures_that_came_are_not_fetched_again(tmp_path):
    """A real process, killed while it fetches."""
    with hostile_server() as server:
        server.delay_seconds = 0.05
        rows = ["url,caption", *(f"{server.url('good', number)},caption {number}" for number in range(60))]
        (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
        command = ["data", "pack", "list.csv", "--out", "out", "--threads", "2", "--quiet"]
        program = "import sys; from open_clip_zerovl.cli import main; sys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen([sys.executable, "-c", program, *command], cwd=tmp_path)
        for _ in range(20):
            assert server.served.acquire(timeout=60)
        process.kill()
        process.wait()
        kept = server.requests.total()
        assert 20 <= kept < 60
        server.delay_seconds = 0.0
        found = pack([str(tmp_path / "list.csv")], tmp_path / "out", work=WORK)
        assert found["pictures"] == 60 and server.requests.total() <= 60 + 10  # those under way were asked for twice
        pack([str(tmp_path / "list.csv")], tmp_path / "whole", work=WORK)
    assert list(shards_of(tmp_path / "out").values()) == list(shards_of(tmp_path / "whole").values())


def test_a_retry_that_is_killed_is_mended_by_any_call(tmp_path, monkeypatch):
    """The shards of the first call are written anew, from more samples; none of the old ones is taken for a new one."""
    with hostile_server() as server:
        kinds = ["flaky" if number % 4 == 1 else "good" for number in range(24)]
        rows = ["url,caption", *(f"{server.url(kind, n)},caption {n}" for n, kind in enumerate(kinds))]
        (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
        settings = PackSettings(test_share=0.2, shard_size=4)
        once = Work(threads=2, attempts=1, progress=False)
        first = pack([str(tmp_path / "list.csv")], tmp_path / "out", settings, work=once)
        assert first["pictures"] == 18 and first["refused"]["http 503"]["rows"] == 6
        original, calls = write.manifest.write_recorded_shard, [0]

        def killed(*arguments, **options):
            calls[0] += 1
            if calls[0] > 2:
                raise Killed
            original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(write.manifest, "write_recorded_shard", killed)
            with pytest.raises(Killed):
                again = Work(threads=2, attempts=1, retry_failed=True, progress=False)
                pack([str(tmp_path / "list.csv")], tmp_path / "out", settings, work=again)
        assert pack([str(tmp_path / "list.csv")], tmp_path / "out", settings, work=once)["pictures"] == 24
        pack([str(tmp_path / "list.csv")], tmp_path / "whole/out", settings, work=once)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole/out")


def test_a_picture_that_changes_meanwhile_ends_the_call(tmp_path, monkeypatch):
    given = as_folder(tmp_path / "in", make_pairs(8))
    original = run.hold_out

    def changing(store, share):
        (given / "a/000.png").write_bytes(picture(77))
        original(store, share)

    monkeypatch.setattr(run, "hold_out", changing)
    with pytest.raises(UserError, match=r"a/000.png has changed since it was read: leave the inputs as they are"):
        pack([str(given)], tmp_path / "out", work=WORK)


def test_threads_do_not_change_the_bytes(undisturbed, tmp_path):
    given, wanted = undisturbed
    pack([str(given)], tmp_path / "out", SETTINGS, work=Work(threads=8, progress=False))
    assert _files(tmp_path / "out") == wanted


def test_one_process_writes_a_folder(tmp_path, monkeypatch):
    given = as_csv(tmp_path / "in", make_pairs(6))
    with monkeypatch.context() as patch:
        patch.setattr(run.reports, "summarize", lambda *arguments: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            pack([str(given)], tmp_path / "out", work=WORK)
    with (
        sole_writer(tmp_path / "out/.pack", "pack"),
        pytest.raises(UserError, match=r"Another process is writing .*out: wait for it\."),
    ):
        pack([str(given)], tmp_path / "out", work=WORK)
