"""Prompt lookup: what followed the last time that the text went like this."""

import dataclasses
from collections.abc import Sequence

from jaxspec.proposers.gate import Gate, after_drafts, after_none, is_open
from jaxspec.proposers.ngram_index import NgramIndex
from jaxspec.proposers.options import SpeculationOptions


@dataclasses.dataclass
class _Lookup:
    """What is kept of one request."""

    index: NgramIndex
    gate: Gate = Gate()
    proposed: bool = False
    """Whether drafts were proposed since the last commit."""


class NgramProposer:
    """Looks up the end of every request in the request itself; on the host.

    Where the device looks up too, results come a step late: it is asked again before it hears what
    became of its last answer.
    """

    def __init__(self, options: SpeculationOptions, alone: bool = True):
        self.options = options
        self.alone = alone
        """Whether nobody else drafts, so that every draft is from here."""
        self.lookups: dict[int, _Lookup] = {}

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        lookup = self.lookups.setdefault(request, _Lookup(self._new_index()))
        lookup.index.extend(tokens)
        if num_drafts and (self.alone or lookup.proposed):
            lookup.gate = after_drafts(lookup.gate, accepted / num_drafts)
        elif lookup.proposed:  # a wide step for nothing: by then the text went on differently
            lookup.gate = after_drafts(lookup.gate, 0.0)
        else:
            lookup.gate = after_none(lookup.gate)
        lookup.proposed = False

    def propose(self, request: int, room: int) -> Sequence[int]:
        lookup = self.lookups[request]
        if not is_open(lookup.gate, self.options):
            return ()
        if self.alone:
            room = min(room, self.options.num_drafts)
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
    """Speaks up only where the longest run that may be looked up was found."""
    only_longest = dataclasses.replace(options, min_ngram=options.max_ngram)
    return NgramProposer(only_longest, alone=False)
