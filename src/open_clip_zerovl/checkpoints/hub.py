"""An exported folder on a hub, through huggingface_hub: `zerovl export --push-to-hub REPO`.

All files go up in one commit, so that a push that is cut off leaves the repository as it was.

Two files differ from the folder's: the card loads the model by the repository's name, and `hf_model_name` and
`hf_tokenizer_name` of open_clip's config name the repository, which holds the text tower's config, in place of a folder here.
"""

from __future__ import annotations

import json
from pathlib import Path

from open_clip_zerovl.checkpoints.card import CARD_FILE, FOLDER_HERE, MOVED
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.local_dir import CONFIG_FILE, LOCAL_DIR


def check_hub(repo: str) -> None:
    """Check a push before the work: the name, the token, whether the hub answers, and the right to write.

    Raises:
        UserError: the token may only read.
        OSError, ValueError: huggingface_hub's own, without a token, for another name, or if the hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    known = HfApi().whoami()
    if ((known.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise UserError(
            f"the hub's token of {known.get('name')} may only read, so {repo} cannot be written: make one with the right to "
            "write at the hub's settings, and give it by HF_TOKEN or `hf auth login`"
        )


def push_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Push an exported folder to a repository in one commit.

    The repository is made if it is missing.

    Files of the repository that the folder does not have are kept; a card that is there is replaced (its history keeps it).

    Args:
        folder: written by `export_local_dir` or `export_transformers`.
        repo: NAMESPACE/NAME, or a name alone for the token's owner.
        private: for a repository that is made.

    Returns:
        The address of the commit.

    Raises:
        OSError: the push failed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    name = hub.create_repo(repo, private=private, exist_ok=True).repo_id
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    changed = _for_repository(folder, name)
    operations = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=changed.get(file, str(path)))
        for file, path in files.items()
    ]
    commit = hub.create_commit(name, operations, commit_message=f"Add {folder.name}")
    return str(commit.commit_url)


def _for_repository(folder: Path, repo: str) -> dict[str, bytes]:
    """List the files with another content in the repository than in the folder."""
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
