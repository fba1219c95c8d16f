"""The ways to propose. A method is one entry of `METHODS`; `docs/methods.md` shows how to add one.

On the device a drafter model proposes a block for every slot; what it remembers of a slot lives in
the engine's state. On the host a `HostProposer` proposes from the tokens alone; prompt lookup can
do so on the device as well. Whoever proposes, verification, acceptance and commit are the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxspec.proposers.ngram import NgramProposer, long_matches
from jaxspec.proposers.options import SpeculationOptions


@runtime_checkable
class HostProposer(Protocol):
    """Drafts from tokens. What it says can cost time, never change a token."""

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        """`tokens` follow on what the request has: a chunk of its prompt, or what a step gave it.

        The step verified `num_drafts` drafts for it, whoever drafted them, and kept `accepted`.
        """

    def propose(self, request: int, room: int) -> Sequence[int]:
        """At most `room` drafts, at least one, of what may follow; none where it has no idea."""

    def release(self, request: int) -> None:
        """The request has ended, or is going to be read again from its first token."""


@dataclasses.dataclass(frozen=True)
class Method:
    """Who proposes. With both, what the host proposes for a request replaces the drafter's."""

    drafter: bool = False
    """Whether the drafter model proposes, on the device."""
    host: Callable[[SpeculationOptions], HostProposer] | None = None
    """Makes what proposes on the host."""
    looks_up: bool = False
    """Whether the device can look the same spans up itself, with tokens that the host has not read
    yet. The host then only says when drafting is worth a wider step."""


METHODS = {
    "dflash": Method(drafter=True),
    "ngram": Method(host=NgramProposer, looks_up=True),
    "dflash+ngram": Method(drafter=True, host=long_matches),
    "none": Method(),
}
