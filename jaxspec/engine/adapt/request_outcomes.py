"""The host's copy of the outcomes by which the device shares out tokens among the requests."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from jaxspec.acceptance.outcomes import after_step, survival

Stacked = Float[np.ndarray, "batch drafts"]
Counts = tuple[Float[np.ndarray, " drafts"], Float[np.ndarray, " drafts"]]


class RequestOutcomes:
    """How many drafts of every request were tried and kept, by their place in the block."""

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts
        self._counts: dict[int, Counts] = {}
        self._unread: dict[int, tuple[int, int]] = {}
        """Last outcomes of requests that are not in their counts yet. All those of a step are added
        at once, which is cheaper."""

    def commit(self, request: int, num_drafts: int, accepted: int) -> None:
        if request in self._unread:
            self._read([request])
        self._unread[request] = (num_drafts, accepted)

    def release(self, request: int) -> None:
        self._counts.pop(request, None)
        self._unread.pop(request, None)

    def survival(self, requests: Sequence[int]) -> Float[np.ndarray, "batch drafts"]:
        """For every draft of these requests, the chance that it and all before it are accepted."""
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
