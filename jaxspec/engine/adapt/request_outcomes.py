"""The host's copy of what the device knows of each request's drafts when it shares out tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from jaxspec.acceptance.outcomes import after_step, survival

Stacked = Float[np.ndarray, "batch drafts"]
Counts = tuple[Float[np.ndarray, " drafts"], Float[np.ndarray, " drafts"]]


class RequestOutcomes:
    """Tried and kept drafts of every request, by their place in the block."""

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts
        self._counts: dict[int, Counts] = {}
        self._unread: dict[int, tuple[int, int]] = {}
        """The last outcome of each request that is not in its counts yet: all of a step are added
        at once, which is cheaper."""

    def commit(self, request: int, num_drafts: int, accepted: int) -> None:
        if request in self._unread:
            self._read([request])
        self._unread[request] = (num_drafts, accepted)

    def release(self, request: int) -> None:
        self._counts.pop(request, None)
        self._unread.pop(request, None)

    def survival(self, requests: Sequence[int]) -> Float[np.ndarray, "batch drafts"]:
        """The chance of every draft of these requests that it and all before it are accepted."""
        self._read(list(self._unread))
        if not requests:
            return np.zeros((0, self.num_drafts))
        return np.asarray(survival(*self._stacked(requests)))

    def _read(self, requests: Sequence[int]) -> None:
        if not requests:
            return
        num_drafts, accepted = np.array([self._unread.pop(one) for one in requests]).T
        counts = after_step(*self._stacked(requests), num_drafts, accepted)
        self._counts.update(zip(requests, zip(*map(np.asarray, counts))))

    def _stacked(self, requests: Iterable[int]) -> tuple[Stacked, Stacked]:
        nothing = np.zeros(self.num_drafts), np.zeros(self.num_drafts)
        tried, kept = zip(*(self._counts.get(one, nothing) for one in requests))
        return np.stack(tried), np.stack(kept)
