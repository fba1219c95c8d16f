"""The host's whole record of its requests: an immutable ledger. `ledger.py` has its transitions."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.engine.adapt.loop_costs import Size
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.schedule.pages import PageBook
from jaxspec.engine.stats.acceptance import PooledStats
from jaxspec.engine.stats.latencies import Latencies
from jaxspec.engine.step.io import StepResult

NOBODY: Mapping[int, Request] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step that was launched and whose result the host has not read yet."""

    requests: tuple[int, ...]
    """Ids of the requests in its batch, in order."""
    result: StepResult
    silent: frozenset[int] = frozenset()
    """Requests that get no token from the step, because their prompt continues after this chunk, or
    because the token after it was emitted before."""
    prompt_tokens: int = 0
    """Prompt tokens that it computes, including padding; 0 for a decode step."""
    size: Size | None = None
    """Batch size and chosen width of a decode step; None for a step that only reads prompts."""
    same_program: bool = False
    """Whether the program of the step before gave this result too: the tokens of requests that
    decode in a step that also reads a prompt. The first of the two has the size."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every live request, what it holds, and what its caller has not taken yet."""

    book: PageBook
    """Pages of the running requests."""
    num_drafts: int
    """Most drafts of a request in a step. Statistics have one place for each."""
    synthetic: bool = False
    """Whether acceptance is drawn instead of found by comparing drafts."""
    prefix_caching: bool = False
    """Whether requests whose texts begin alike share pages."""
    exact: bool = False
    """Whether requests share only pages that the usual prefill program wrote. Decode steps, and
    prefill that returns log probabilities of prompts, may write other bits."""
    waiting: tuple[Request, ...] = ()
    """Requests without a slot, in the order in which they came."""
    running: Mapping[int, Request] = NOBODY
    """Requests with a slot, by id, in the order in which they were admitted."""
    launched: tuple[Launched, ...] = ()
    """Steps whose results are still to be read, oldest first."""
    read_since_decode: int = 0
    """Tokens of prompts that were computed since the last decode step."""
    read_for: frozenset[int] = frozenset()
    """The requests whose prompts were read since the last decode step."""
    read_last: tuple[int, ...] = ()
    """The requests whose prompts the last prefill program read."""
    increments: tuple[Increment, ...] = ()
    """What steps added to requests and their callers have not taken yet, oldest first."""
    suspects: Mapping[int, int] = MappingProxyType({})
    """Requests of a failed step, with the number of tokens that each had then. Each runs alone
    until it has more tokens or fails again, in which case it ends as the cause of the failure."""
    finished: PooledStats = PooledStats()
    """Statistics of the requests that have ended, except those that their caller dropped."""
    latencies: Latencies = Latencies()
    """Latencies of the same requests."""
    prefix_cache_queries: int = 0
    """Prompt tokens of all admitted requests that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """How many of these were found."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)
