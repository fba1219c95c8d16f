"""The methods of proposing drafts. A method is one entry of `METHODS`; `docs/methods.md` shows how
to add one.

A proposer runs on the device (`DeviceProposer`: a drafter model, prompt lookup) or on the host
(`HostProposer`: anything that reads tokens). Verification, acceptance and commit are the same for
all proposers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxspec.proposers.ngram import NgramProposer, long_matches
from jaxspec.proposers.options import SpeculationOptions

if TYPE_CHECKING:
    from jaxspec.proposers.device import DeviceProposer


@runtime_checkable
class HostProposer(Protocol):
    """Proposes drafts from tokens, on the host. Its drafts change how fast tokens are generated,
    never the distribution that they come from."""

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        """Adds `tokens` to a request: a chunk of its prompt, or what a step emitted for it.

        The step verified `num_drafts` drafts for the request, from any proposer, and accepted
        `accepted` of them.
        """

    def propose(self, request: int, room: int) -> Sequence[int]:
        """At most `room` tokens that may follow; none if there is nothing to propose."""
        ...

    def release(self, request: int) -> None:
        """Discards the state of a request that has ended or will be read again from its first
        token."""


@dataclasses.dataclass(frozen=True)
class Method:
    """Which proposers a method uses."""

    drafter: bool = False
    """Whether the engine's drafter model proposes."""
    device: "Callable[[SpeculationOptions, int], DeviceProposer] | None" = None
    """Makes a device proposer without weights, from the options and the maximal number of drafts
    per step."""
    host: Callable[[SpeculationOptions], HostProposer] | None = None
    """Makes a host proposer. In a method with a drafter, if it has drafts for a request, they
    replace the drafter's. In a method with a device proposer, it only decides in which steps the
    device drafts; with the lockstep driver it proposes alone."""


def _lookup(options: SpeculationOptions, num_drafts: int) -> "DeviceProposer":
    from jaxspec.proposers.lookup import lookup_of  # imports jax, which --help never needs

    return lookup_of(options, num_drafts)


DRAFTERS = ("dflash", "dflash2", "dspark", "eagle3")
"""Kinds of drafter models. Each is a method, alone and together with prompt lookup."""

METHODS = {
    **{kind: Method(drafter=True) for kind in DRAFTERS},
    "ngram": Method(device=_lookup, host=NgramProposer),
    **{f"{kind}+ngram": Method(drafter=True, host=long_matches) for kind in DRAFTERS},
    "none": Method(),
}
