"""A folder is claimed for one request; identities of values."""

from __future__ import annotations

import numpy as np
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import claim, digest_of, number_of

REQUEST = {"--seed": 1, "--set lr": "1e-3", "--lora": None, "alphas": [0, 1], "content of x": "ab"}


def test_the_same_request_goes_on_and_another_one_may_replace_nothing(tmp_path):
    file = tmp_path / "out" / "request.json"
    assert not claim(file, REQUEST) and claim(file, dict(reversed(REQUEST.items())))
    for changed, words in (
        ({"--seed": 2}, "out was begun with --seed 1, and this call has --seed 2; repeat the"),
        ({"--set lr": None}, "with --set lr=1e-3, and this call has no --set lr"),
        ({"alphas": [0, 0.5]}, "with alphas 1, and this call has alphas 0.5"),
        ({"more": "x"}, "with no more, and this call has more x"),
        ({"content of x": "cd"}, "was begun before the content of x changed"),
    ):
        before = file.read_bytes()
        with pytest.raises(UserError, match=words):
            claim(file, {**REQUEST, **changed})
        assert file.read_bytes() == before
        assert not claim(file, {**REQUEST, **changed}, restart=lambda stored: stored == REQUEST)
        assert claim(file, {**REQUEST, **changed})
        assert not claim(file, REQUEST, restart=lambda stored: True)


def test_content_decides_and_not_the_path(tmp_path):
    file = tmp_path / "request.json"
    first = {"--data": "x=/d", "content of --data": "ab", "content of --from": None, "--from": "m"}
    claim(file, first)
    assert claim(file, {**first, "--data": "y=/e"}) == first
    for changed, words in (
        ({"content of --data": "cd"}, "was begun before the content of --data changed"),
        (
            {"content of --data": "cd", "--data": "y"},
            "with --data x=/d, and this call has --data y",
        ),
        (
            {"content of --data": None, "--data": "y"},
            "with --data x=/d, and this call has --data y",
        ),
        (
            {"--from": "n"},
            "with --from m, and this call has --from n",
        ),  # nothing is known of either
    ):
        with pytest.raises(UserError, match=words):
            claim(file, {**first, **changed})


def test_a_folder_of_other_files_is_not_claimed(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / ".request.json.1.ab.part").touch()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds thesis.txt and no request.json"):
        claim(tmp_path / "request.json", REQUEST)
    (tmp_path / "thesis.txt").unlink()
    assert not claim(tmp_path / "request.json", REQUEST)
    (tmp_path / "request.json").write_text("{")
    with pytest.raises(UserError, match=r"request.json cannot be read .*remove it"):
        claim(tmp_path / "request.json", REQUEST)


def test_a_digest_divides_its_parts_and_knows_bytes_from_text():
    parts = [("ab", "c"), ("a", "bc"), (["ab", "c"],), (b"ab", b"c"), (b"abc",), (1, 2), (12,)]
    assert len({digest_of(*one) for one in parts}) == len(parts)
    assert digest_of(np.arange(3)) == digest_of(np.arange(3).tobytes()) != digest_of(np.arange(4))
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert number_of("f" * 32) == -1 and number_of("0" * 32) == 1 and number_of("7f" + "0" * 14) > 0
