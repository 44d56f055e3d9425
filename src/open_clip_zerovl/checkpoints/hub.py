"""An exported folder on a hub, through huggingface_hub: `zerovl export --push-to-hub REPO`.

All files go up in one commit, so that a push that is cut off leaves the repository as it was. Then the hub returns its
files, and each is compared with the folder's by size and hash; only then the push counts as done.

Two files differ from the folder's: the card loads the model by the repository's name, and `hf_model_name` and
`hf_tokenizer_name` of open_clip's config name the repository, which holds the text tower's config, in place of a folder here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from open_clip_zerovl.checkpoints.card import CARD_FILE, FOLDER_HERE, MOVED
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.models.local_dir import CONFIG_FILE, LOCAL_DIR

_Answer = TypeVar("_Answer")
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}")
_WRITE = "make one with the right to write at the hub's settings, and give it by HF_TOKEN or `hf auth login`"


def check_hub(repo: str) -> None:
    """Check a push before the work: the name, the token, whether the hub answers, and the right to write.

    Raises:
        UserError: one of them is wrong, with the remedy.
    """
    from huggingface_hub import HfApi, get_token

    if not _NAME.fullmatch(repo) or "--" in repo or ".." in repo:
        raise UserError(f"'{repo}' is not the name of a repository on a hub: give NAMESPACE/NAME")
    if not get_token():
        raise UserError(f"there is no token for the hub, so {repo} cannot be written: {_WRITE}")
    known = _asked(lambda: HfApi().whoami(), repo)
    if ((known.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise UserError(
            f"the hub's token of {known.get('name')} may only read, so {repo} cannot be written: {_WRITE}"
        )


def push_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Writes an exported folder to a repository in one commit; the repository is made if it is missing.

    Files of the repository that the folder does not have are kept; a card that is there is replaced (its history keeps it).

    Args:
        folder: written by `export_local_dir` or `export_transformers`.
        repo: NAMESPACE/NAME, or a name alone for the token's owner.
        private: for a repository that is made.

    Returns:
        The address of the commit.

    Raises:
        UserError: as `check_hub`; the push failed, or the hub does not hold the pushed files.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    name = _asked(lambda: hub.create_repo(repo, private=private, exist_ok=True), repo).repo_id
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    changed = _for_repository(folder, name)
    operations = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=changed.get(file, str(path)))
        for file, path in files.items()
    ]
    commit = _asked(
        lambda: hub.create_commit(name, operations, commit_message=f"Add {folder.name}"), name
    )
    tree = _asked(lambda: list(hub.list_repo_tree(name, revision=commit.oid)), name)
    there = {entry.path: entry for entry in tree}
    for file, path in files.items():
        if not _holds(there.get(file), changed.get(file), path):
            raise UserError(
                f"the hub does not hold {file} in {name} as it was pushed: push {folder} again"
            )
    return str(commit.commit_url)


def _for_repository(folder: Path, repo: str) -> dict[str, bytes]:
    """The files whose content differs between the repository and the folder."""
    changed = {}
    if (folder / CARD_FILE).is_file():
        card = (folder / CARD_FILE).read_text(encoding="utf-8").replace(f"\n{MOVED}\n", "")
        card = card.replace(LOCAL_DIR + FOLDER_HERE, f"hf-hub:{repo}").replace(FOLDER_HERE, repo)
        changed[CARD_FILE] = card.encode()
    if (folder / CONFIG_FILE).is_file():
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        text_cfg = config["model_cfg"]["text_cfg"]
        for key in ("hf_model_name", "hf_tokenizer_name"):
            if text_cfg.get(key):
                text_cfg[key] = repo
        changed[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()
    return changed


def _holds(entry: object, content: bytes | None, path: Path) -> bool:
    """True if an entry of the hub's tree has this content; None: that of the file."""
    size = len(content) if content is not None else path.stat().st_size
    if entry is None or getattr(entry, "size", None) != size:
        return False
    large = getattr(entry, "lfs", None)
    digest = hashlib.sha256() if large else hashlib.sha1(f"blob {size}\0".encode())
    if content is not None:
        digest.update(content)
    else:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() == (large.sha256 if large else getattr(entry, "blob_id", None))


def _asked(question: Callable[[], _Answer], repo: str) -> _Answer:
    """The hub's answer. UserError for an error, or if the hub cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # Before huggingface_hub 1.0 requests' errors, also for an unknown token; since then httpx's. Its uploader raises
    # RuntimeError.
    failures: tuple[type[Exception], ...] = (
        *HfHubHTTPError.__bases__,
        OSError,
        RuntimeError,
        ValueError,
    )
    try:
        return question()
    except HFValidationError as error:
        raise UserError(
            f"'{repo}' is not the name of a repository on a hub ({first_line(error)})"
        ) from error
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"HF_HUB_OFFLINE forbids to push {repo}: unset it, or leave --push-to-hub out"
        ) from error
    except failures as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is None:
            raise UserError(
                f"the hub cannot be reached, or stopped answering ({type(error).__name__}: {first_line(error)}); {repo} is as "
                "it was: push again when the network is back"
            ) from error
        if status == 401:
            raise UserError(
                f"the hub does not know the token, so {repo} cannot be written: {_WRITE}"
            ) from error
        if status in (403, 404):
            raise UserError(
                f"the token may not write {repo} (the hub answers {status}): give a repository of your own, or a token with "
                "the right to write there; nothing was pushed"
            ) from error
        raise UserError(
            f"the hub refuses {repo} ({status}: {first_line(error)}); nothing was pushed"
        ) from error
