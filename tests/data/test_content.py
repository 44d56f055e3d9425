"""What data arguments hold: copies are the same data, and other files at the same paths are not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from open_clip_zerovl.core.files import file_digests
from open_clip_zerovl.data.names import CLASS_NAMES
from open_clip_zerovl.data.sets import open_retrieval_set
from open_clip_zerovl.data.sources import content_of_sources
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.shards.files import write_retrieval_set, write_source
from open_clip_zerovl.shards.tar import Sample
from support.pairs import picture


def sample(number: int, **files: bytes) -> Sample:
    return Sample(f"{number:03d}", {"png": picture(number), "txt": b"a caption", **files})


def shards(folder: Path) -> str:
    write_source(folder, [sample(number) for number in range(6)], shard_size=3)
    return f"x={folder}"


def shards_of_classes(folder: Path) -> str:
    write_source(folder, [sample(number, cls=b"0") for number in range(3)], shard_size=3)
    (folder / CLASS_NAMES).write_text("cat\n")
    return f"x={folder}"


def retrieval_set(folder: Path) -> str:
    write_retrieval_set(folder, [sample(number) for number in range(3)])
    return str(folder)


def folders_of_classes(folder: Path) -> str:
    for number, label in enumerate(("cat", "dog", "cat")):
        (folder / label).mkdir(exist_ok=True)
        (folder / label / f"{number}.png").write_bytes(picture(number))
    return str(folder)


FORMS = {
    # form -> its content, the files of which each counts
    shards: (content_of_sources, ["train-00000.tar", "train-00001.tar"]),
    shards_of_classes: (content_of_sources, ["train-00000.tar", CLASS_NAMES]),
    retrieval_set: (lambda data: open_retrieval_set(data).content(), ["test/0.tar"]),
    folders_of_classes: (
        lambda data: open_labelled_set(data).content(),
        ["cat/2.png", "dog/1.png"],
    ),
}


def changed_in_place(file: Path) -> None:
    """Change a caption, a name or a picture; size, modification time and inode stay."""
    status = file.stat()
    content = file.read_bytes()
    other = content.replace(b"a caption", b"b caption", 1).replace(b"cat", b"cow", 1)
    if other == content:
        other = bytes([*content[:-20], content[-20] ^ 1, *content[-19:]])
    file.write_bytes(other)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_the_same_data_and_a_file_that_was_replaced_is_not(form, tmp_path):
    content_of, files = FORMS[form]
    folder = tmp_path / "x"
    folder.mkdir()
    data = form(folder)
    first = content_of(data)
    for touched in folder.rglob("*"):
        os.utime(touched)
    assert content_of(data) == first
    copy = tmp_path / "another name"
    shutil.copytree(folder, copy)
    assert content_of(data.replace(str(folder), str(copy)).replace("x=", "y=")) == first
    for name in files:
        changed_in_place(copy / name)
        assert content_of(data.replace(str(folder), str(copy))) != first, name
        shutil.copyfile(folder / name, copy / name)
    assert content_of(data.replace(str(folder), str(copy))) == first


def test_shards_in_another_order_and_chosen_samples_are_other_data(tmp_path):
    shards(tmp_path)
    first, second = (str(tmp_path / f"train-0000{number}.tar") for number in range(2))
    given = [f"a={first}::b={second}", f"b={second}::a={first}", f"a={first}", f"a={tmp_path}"]
    assert len({content_of_sources(data) for data in given}) == len(given)
    assert content_of_sources("a=https://h/{0..1}.tar@" + sizes(tmp_path)) != content_of_sources(
        "a=https://other/{0..1}.tar@" + sizes(tmp_path)
    )


def sizes(folder: Path) -> str:
    (folder / "remote.json").write_text('{"0.tar": 3, "1.tar": 3}')
    return str(folder / "remote.json")


def test_a_file_is_read_again_only_after_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[str] = []
    monkeypatch.setattr(
        "open_clip_zerovl.core.files.sha256_of",
        lambda path: read.append(Path(path).name) or Path(path).read_text(),
    )
    monkeypatch.setattr("open_clip_zerovl.core.files._SETTLED_NS", 0)
    folder = tmp_path / "x"
    folder.mkdir()
    files = [folder / name for name in "abc"]
    for file in files[:2]:
        file.write_text("a caption")

    def reads() -> list[str]:
        read.clear()
        digests = file_digests([*files, files[0]])
        assert digests == {str(file): file.read_text() if file.exists() else None for file in files}
        return sorted(read)

    assert reads() == ["a", "b", "c"] and reads() == ["c"]  # which is not there
    os.utime(files[0])
    assert reads() == ["a", "c"] and reads() == ["c"]
    changed_in_place(files[1])
    assert reads() == ["b", "c"]
    # A file of this moment may change once more within the resolution of its time.
    monkeypatch.setattr("open_clip_zerovl.core.files._SETTLED_NS", 10**12)
    os.utime(files[0])
    assert reads() == ["a", "c"] and reads() == ["a", "c"]
