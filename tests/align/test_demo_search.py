"""`make demo-search` on a small source, with small encoders in the place of the fetched ones."""

from __future__ import annotations

import shutil

from scripts import demo_search


def test_it_aligns_own_pairs_and_answers_their_captions_on_one_page(home, tmp_path, capsys):
    encoders = tmp_path / "encoders"
    encoders.mkdir()
    (encoders / "effnet_lite0").symlink_to(home / "timm")
    (encoders / "minilm").symlink_to(home / "bert-mean")
    (encoders / "README.md").write_text("")  # nothing is fetched
    shutil.copytree(home / "a", tmp_path / "mine")
    mine, out = str(tmp_path / "mine"), tmp_path / "out"
    assert demo_search.demo_search(data=mine, out=out, encoders=encoders) == 0
    page = (tmp_path / "out" / "queries.html").read_text()
    queries = page.count("<h2>")  # of ten samples, some of which have the same caption
    assert 5 <= queries <= 10 and page.count("data:image/jpeg") == 5 * queries
    assert page.count("a red house of") >= 1 and "The answers are in" in capsys.readouterr().out
