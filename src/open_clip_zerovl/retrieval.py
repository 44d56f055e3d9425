"""The names of `open_clip_zerovl.evaluate.retrieval`, under the path by which they are documented."""

from open_clip_zerovl.core.lazy import lazy_exports
from open_clip_zerovl.evaluate.retrieval import PUBLIC_NAMES

__getattr__, __dir__, __all__ = lazy_exports(__name__, PUBLIC_NAMES)
