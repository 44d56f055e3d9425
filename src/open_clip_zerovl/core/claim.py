"""A folder's claim: the request for which it was begun. A later call with the same request goes on; another one is refused.

OUT/pack.json, OUT/request.json ...      the request, as JSON

An input stands in a request by its path and by a digest of its content, `--data` and "content of --data". The content decides:
a copy at another path is the same request, and other content at the same path is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import read_json, write_atomically

CONTENT = "content of "  # begins the names of entries that are digests, which nobody can read
ADVICE = "repeat the earlier call to continue it, or give a new folder"


def claim(
    file: Path,
    request: Mapping[str, Any],
    *,
    restart: Callable[[dict[str, Any]], bool] = lambda stored: False,
) -> dict[str, Any] | None:
    """Claim a file's folder for a request.

    Args:
        file: holds the request; the folder has no others before it.
        restart: True if the stored request may be replaced, since nothing of worth was done for it.

    Returns:
        The request of the earlier call that has claimed it; None for a folder that is claimed now.

    Raises:
        UserError: a folder of other files, or begun for another request.
    """
    request = json.loads(json.dumps(request))
    stored = read_claim(file)
    if stored is None:
        # Beside the lock of this process and the leavings of a killed one.
        entries = file.parent.iterdir() if file.parent.is_dir() else ()
        others = [
            entry.name for entry in entries if entry.name != "lock" and entry.suffix != ".part"
        ]
        if others:
            raise UserError(
                f"{file.parent} holds {others[0]} and no {file.name}, so this program did not begin it; give a new folder"
            )
    elif difference(stored, request) is None:
        return stored
    elif not restart(stored):
        raise UserError(f"{file.parent} {difference(stored, request)}; {ADVICE}")
    write_atomically(file, json.dumps(request, indent=1) + "\n")
    return None


def read_claim(file: Path) -> dict[str, Any] | None:
    """Read the request in a file.

    Returns:
        None without the file.

    Raises:
        UserError: the file cannot be read.
    """
    if not file.exists():
        return None
    content = read_json(file, "remove it, or give a new folder")
    if not isinstance(content, dict):
        raise UserError(f"{file} was not written by this program; give a new folder")
    return content


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Word the first entry that differs as the rest of a sentence about what was begun.

    "was begun with --seed 1, and this call has --seed 0", "was begun before the content of --from changed"

    Returns:
        None for the same request.
    """
    for name in {**wanted, **stored}:
        old, new = stored.get(name), wanted.get(name)
        content = wanted.get(f"{CONTENT}{name}")
        copied = content is not None and content == stored.get(f"{CONTENT}{name}")
        if old == new or copied:
            continue
        if name.startswith(CONTENT):
            return f"was begun before the {name} changed"
        if isinstance(old, list) and isinstance(new, list):
            pairs = zip_longest(old, new)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
        return f"was begun with {_shown(name, old)}, and this call has {_shown(name, new)}"
    return None


def _shown(name: str, value: Any) -> str:
    """An entry with its value; "no NAME" without one."""
    if value is None:
        return f"no {name}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{name}{'=' if name.startswith('--set ') else ' '}{text}"
