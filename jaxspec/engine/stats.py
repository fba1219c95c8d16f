"""What is counted of a request, with one definition each."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """Statistics of one request. A verify step is a target forward that checked drafts for it."""

    prompt_tokens: int
    """Tokens of the prompt."""
    generation_tokens: int
    """Tokens emitted, the ending one included."""
    acceptance_lengths: tuple[int, ...]
    """Tokens every verify step gave before any stop or budget cut, bonus token included."""
    num_draft_tokens: int
    """Drafts that were verified."""
    num_accepted_draft_tokens: int
    """Drafts among them that the target agreed with, before any stop or budget cut."""
    accepted_per_position: tuple[int, ...]
    """Verify steps in which the draft at this place of the block was accepted."""
    ttft_s: float = 0.0
    """Seconds from submission to the first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last."""

    @property
    def num_spec_steps(self) -> int:
        """Verify steps."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per verify step; 1 without any."""
        if not self.acceptance_lengths:
            return 1.0
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts per verified draft; 0 without any."""
        if not self.num_draft_tokens:
            return 0.0
        return self.num_accepted_draft_tokens / self.num_draft_tokens

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Unconditional: accepted at this place over all verify steps."""
        return tuple(count / self.num_spec_steps for count in self.accepted_per_position)


@dataclasses.dataclass(frozen=True)
class Tally:
    """Running counts behind `RequestStats`."""

    acceptance_lengths: tuple[int, ...] = ()
    num_draft_tokens: int = 0


def count_step(tally: Tally, emitted: int, num_drafts: int) -> Tally:
    """Adds one step's result; a step without drafts is plain decoding and counts no drafts."""
    if num_drafts == 0:
        return tally
    return Tally((*tally.acceptance_lengths, emitted), tally.num_draft_tokens + num_drafts)
