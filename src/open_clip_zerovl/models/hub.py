"""The model hub, which may be out of reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from open_clip_zerovl.core.errors import first_line

ANSWER_SECONDS = 5.0


@contextmanager
def hub_or_cache(asked: bool = True) -> Iterator[None]:
    """Take models of the hub from its cache within the block if it does not answer.

    It is not `asked` for local files.

    huggingface_hub repeats each request that fails for half a minute, and a model that is not cached takes several.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline = constants.HF_HUB_OFFLINE
    try:
        if asked and not offline:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception as error:  # of one of three HTTP libraries, by the hub's release
        logging.warning(
            "%s cannot be reached (%s): only its cache is searched",
            constants.ENDPOINT,
            first_line(error),
        )
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
