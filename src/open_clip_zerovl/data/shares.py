"""One reader's share of a source in an epoch: shuffled within a window, every bad sample replaced, entered at any place.

    pieces --PieceReader--> stream of n raw samples --local_order, follow--> n places --Share.take--> n good samples

Place p shows item `order[p]` of the stream. Where that cannot be shown, the nearest good one of the places p+1, p-1, p+2, p-2
... stands in for it, up to MARGIN_SAMPLES away; the order is shuffled, so that a run of rotten samples in a shard has good
neighbours. A share that is entered at place p reads from place p - MARGIN_SAMPLES on, and so finds the same stand-ins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from open_clip_zerovl.data.health import Fault, Loss
from open_clip_zerovl.data.images import BadImage
from open_clip_zerovl.data.pieces import PieceReader
from open_clip_zerovl.data.reading import RawSample, sample_sentence
from open_clip_zerovl.data.schedule import Piece
from open_clip_zerovl.errors import UserError

MARGIN_SAMPLES = 64  # how far a stand-in may be; encoded samples of so many places are kept
_CHUNK = 4096

Item = TypeVar("Item")
Image = TypeVar("Image")


def local_order(count: int, window: int, rng: np.random.Generator) -> np.ndarray:
    """A shuffled order of `count` items that a reader of a stream can follow with `window` of them in memory.

    Item i comes at most `window` places from where it lies, so that a reader that starts in the middle has to look back no
    further; where all items fit into the window it is a plain random permutation.

    Returns:
        (count,) the item to take at each place.
    """
    if count <= window:
        return rng.permutation(count)
    return np.argsort(np.arange(count) + rng.random(count) * window, kind="stable")


def follow(order: np.ndarray, stream: Iterator[Item], arrived: int = 0) -> Iterator[Item]:
    """The items of a stream in another order, reading no further ahead than the order asks for.

    Args:
        order: numbers of items, each at most once; what it leaves out is dropped as it comes.
        arrived: number of the stream's first item, where the stream was entered in the middle.
    """
    first = arrived
    end = int(order.max()) + 1 if len(order) else arrived
    asked = np.zeros(max(0, end - first), dtype=bool)
    asked[order - first] = True
    waiting: dict[int, Item] = {}
    for begin in range(0, len(order), _CHUNK):
        for wanted in order[begin : begin + _CHUNK].tolist():
            while arrived <= wanted:
                item = next(stream)
                if asked[arrived - first]:
                    waiting[arrived] = item
                arrived += 1
            yield waiting.pop(wanted)
    next(stream, None)  # lets the reader find out whether its last shard ends where it should


@dataclass
class Share:
    """See the module's text.

    Args:
        pieces: reads the stream.
        order: (n,) `local_order` of the stream.
        begin: the first place that `take` delivers.
    """

    pieces: PieceReader
    order: np.ndarray
    begin: int = 0
    _raw: Iterator[RawSample] = field(init=False, repr=False)
    _past: deque[RawSample] = field(init=False, repr=False)
    _ahead: deque[RawSample] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._raw = self._places()
        self._past, self._ahead = deque(maxlen=MARGIN_SAMPLES), deque()

    def _places(self) -> Iterator[RawSample]:
        """Raw samples place by place, from `begin` on; the margin before goes into the past."""
        if self.begin >= len(self.order):
            return
        margin = max(0, self.begin - MARGIN_SAMPLES)
        asked = self.order[margin:]
        first = int(asked.min())
        places = follow(asked, self.pieces.samples(first), first)
        for _ in range(self.begin - margin):
            self._past.append(next(places))
        yield from places

    def take(self, decode: Callable[[RawSample], Image]) -> tuple[RawSample, Image, Loss | None]:
        """The next place: a sample, what `decode` makes of it, and the loss if it stands in for another.

        Raises:
            UserError: a bad sample that may not be replaced, or that nothing can replace.
        """
        sample = self._ahead.popleft() if self._ahead else next(self._raw)
        loss = sample.stands_for
        shown = _attempt(sample, decode)
        if isinstance(shown, Fault):
            reading = self.pieces.reading
            if reading.fail:
                raise UserError(sample_sentence(reading.source, sample, shown))
            # A place that a lost shard left and whose first stand-in is bad is one loss, and the shard's.
            loss = loss or Loss(sample.source, shown.reason, sample.key, sample.shard, shown.detail, sample.position)
            found = self._stand_in(sample, decode)
            if found is None:
                raise UserError(
                    f"{sample_sentence(reading.source, sample, shown)}; none of the {2 * MARGIN_SAMPLES} samples around "
                    "it can be shown either"
                )
            self._past.append(sample)
            return replace(found[0], stands_for=loss), found[1], loss
        self._past.append(sample)
        return sample, shown, loss

    def _stand_in(self, bad: RawSample, decode: Callable[[RawSample], Image]) -> tuple[RawSample, Image] | None:
        for candidate in self._neighbours(bad):
            shown = _attempt(candidate, decode)
            if not isinstance(shown, Fault):
                return candidate, shown
        return None

    def _neighbours(self, bad: RawSample) -> Iterator[RawSample]:
        for distance in range(1, MARGIN_SAMPLES + 1):
            while len(self._ahead) < distance:
                following = next(self._raw, None)
                if following is None:
                    break
                self._ahead.append(following)
            if len(self._ahead) >= distance:
                yield self._ahead[distance - 1]
            if len(self._past) >= distance:
                yield self._past[-distance]
        # A small share may hold nothing good: other pieces of the epoch then help out.
        alone = Piece(-1, 0, 1, bad.place)
        for attempt in range(min(MARGIN_SAMPLES, len(self.pieces.epoch_pieces))):
            yield self.pieces.substitutes.get(alone, bad.place, 0, attempt=attempt)

    def finish(self) -> None:
        """Let the reader find out whether its last shard ends where it should."""
        next(self._raw, None)


def _attempt(sample: RawSample, decode: Callable[[RawSample], Image]) -> Image | Fault:
    if sample.fault is not None:
        return sample.fault
    try:
        return decode(sample)
    except BadImage as error:
        return error.fault
