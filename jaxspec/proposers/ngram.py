"""Prompt lookup on the host: proposes what followed an earlier occurrence of the newest tokens."""

import dataclasses
from collections.abc import Sequence

from jaxspec.proposers.gate import Gate, after_drafts, after_no_drafts, is_open
from jaxspec.proposers.ngram_index import NgramIndex
from jaxspec.proposers.options import SpeculationOptions


@dataclasses.dataclass
class _Lookup:
    """The state of one request."""

    index: NgramIndex
    gate: Gate = Gate()
    proposed: bool = False
    """Whether drafts were proposed since the last commit."""


class NgramProposer:
    """Looks up the newest tokens of a request among its earlier tokens.

    If the device looks up too, results arrive a step late: `propose` is called again before
    `commit` reports how many of the last drafts were accepted.
    """

    def __init__(self, options: SpeculationOptions, alone: bool = True):
        self.options = options
        self.alone = alone
        """Whether this is the only proposer, so that the result of every draft updates its gate."""
        self.lookups: dict[int, _Lookup] = {}

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        lookup = self.lookups.setdefault(request, _Lookup(self._new_index()))
        lookup.index.extend(tokens)
        if num_drafts and (self.alone or lookup.proposed):
            lookup.gate = after_drafts(lookup.gate, accepted / num_drafts)
        elif lookup.proposed:  # the device looked up again with newer tokens, and found no match
            lookup.gate = after_drafts(lookup.gate, 0.0)
        else:
            lookup.gate = after_no_drafts(lookup.gate)
        lookup.proposed = False

    def propose(self, request: int, room: int) -> Sequence[int]:
        lookup = self.lookups[request]
        if not is_open(lookup.gate, self.options):
            return ()
        if self.alone:
            room = min(room, self.options.drafts_of_lookup)
        drafts = lookup.index.continuation(room)
        lookup.proposed = bool(drafts)
        return drafts

    def release(self, request: int) -> None:
        self.lookups.pop(request, None)

    def _new_index(self) -> NgramIndex:
        options = self.options
        return NgramIndex(
            options.min_ngram, options.max_ngram, options.ngram_match, options.ngram_look_back
        )


def long_matches(options: SpeculationOptions) -> NgramProposer:
    """A proposer for use with a drafter: it proposes only after a match of `max_ngram` tokens."""
    only_longest = dataclasses.replace(options, min_ngram=options.max_ngram)
    return NgramProposer(only_longest, alone=False)
