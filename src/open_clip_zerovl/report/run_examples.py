"""Examples of retrieval at a run's last evaluation: `examples.json`, which its page shows.

`retrieval.gallery.retrieval_examples` makes them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, write_atomically

EXAMPLES = "examples.json"


def write_examples(folder: str | os.PathLike[str], epoch: int, examples: list[dict[str, Any]]) -> None:
    """Write a run's examples in place of earlier ones.

    Args:
        examples: each has `set`, `caption`, `rank` (of its own picture, from 1), `own` (a picture) and `top`: pictures with
            `own` (bool). A picture is a data URI, `picture`.
    """
    write_atomically(Path(folder) / EXAMPLES, json.dumps({"epoch": epoch, "examples": examples}))


def read_examples(folder: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """The epoch of a run's examples, and the examples; (0, []) where it has none.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(folder) / EXAMPLES
    if not path.exists():
        return 0, []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        examples = [
            {
                "set": str(one["set"]),
                "caption": str(one["caption"]),
                "rank": int(one["rank"]),
                "own": _picture(one["own"]),
                "top": [(_picture(shown["picture"]), bool(shown["own"])) for shown in one["top"]],
            }
            for one in content["examples"]
        ]
        return int(content["epoch"]), examples
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not what training wrote ({error}); delete it, and the page comes without"
        ) from error


def _picture(uri: Any) -> str:
    """A data URI of a picture, and nothing that a page would load from elsewhere."""
    if not isinstance(uri, str) or not uri.startswith("data:image/") or '"' in uri:
        raise ValueError("a picture that is no data URI")
    return uri
