"""How an engine is laid out, fixed when it is made: sizes, methods, and which programs can run."""

import dataclasses
from collections.abc import Iterator

from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.adapt.even import Even, Width
from jaxspec.engine.step.io import Drafting

WEIGHTS = 256
"""A program takes at least as long as the arithmetic of about this many tokens, because it reads
the weights: a GPU computes some 250 operations in the time in which it reads a byte."""
NOT_DECODING = 2
"""Slots that do not decode in a step that also reads a prompt: the prompt's own, and a free one."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Every size that a step is compiled for. The true lengths are inputs of its programs."""

    batch_sizes: tuple[int, ...]
    """Batch sizes of decode steps, in increasing order."""
    prefill_shapes: tuple[tuple[int, int], ...]
    """(batch, width) of prefill steps, in increasing order of tokens."""

    @property
    def largest(self) -> "Shapes":
        """Only the largest size of a decode step and of a prefill step."""
        return Shapes(self.batch_sizes[-1:], self.prefill_shapes[-1:])

    def batch_for(self, count: int) -> int:
        """The smallest batch size that holds `count` requests."""
        return next(batch for batch in self.batch_sizes if batch >= count)

    @property
    def widest_chunk(self) -> int:
        """Most tokens of a prompt that one program reads."""
        return max(width for _, width in self.prefill_shapes)

    @property
    def largest_prefill(self) -> int:
        """Most prompts that one program reads."""
        return max(batch for batch, _ in self.prefill_shapes)

    def width_for(self, count: int) -> int:
        """The smallest width of a prefill step that holds so many tokens, or else the widest."""
        return min((w for _, w in self.prefill_shapes if w >= count), default=self.widest_chunk)


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """Which programs one decode step runs. Only `Plan.decode_programs` and `Plan.mixed_programs`
    choose them, and `Plan.every_decode` enumerates their possible results."""

    batch: int
    width: int
    """Tokens per request that the target reads."""
    drafting: Drafting | None
    """How the device drafts; None if it does not."""
    host_drafts: bool
    """Whether some request has drafts from the host."""
    draws: bool
    """Whether some request samples or returns log probabilities."""
    apart: bool
    """Whether drafting, verification and acceptance run as separate programs."""
    accepts_on_host: bool
    beside: int = 0
    """Prompt tokens that the target also reads in the step, in whole rows; 0 for none."""

    @property
    def takes_host_drafts(self) -> bool:
        """Whether separate programs get drafts from the host, which may be empty."""
        return self.apart and (self.host_drafts or self.drafting is None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and choices that are fixed when the engine is made."""

    method: str
    """A name of `METHODS`."""
    driver: str
    """lockstep: the host accepts between two programs and reads every step before the next.
    overlapped: the device accepts, and the host reads a step while the next one runs."""
    exact: bool
    """Every phase runs through one program of one shape, so that no request's bits depend on the
    method or on the rest of the batch."""
    width: int
    """Tokens per request of the widest decode step: the newest one and its drafts."""
    block_size: int
    """Tokens of the widest block that any step writes; each request holds pages for one such block
    beyond its budget."""
    num_slots: int
    max_model_len: int
    """Tokens of prompt and output together."""
    page_size: int
    num_pages: int
    """Pages of each pool, the trash page among them."""
    shapes: Shapes
    widths: tuple[int, ...] = ()
    """Widths that an adaptive engine chooses from, in increasing order; empty if it does not adapt.
    """
    adapts_from: int = 1
    """The smallest batch size for which it chooses; smaller batches always get the full width."""
    shares_tokens: bool = False
    """Whether a step of a chosen width gives each request that many tokens only on average, and
    more of them to requests whose drafts are more likely accepted."""
    proposer: int | None = None
    """Index in `Models.proposers` of the proposer that drafts; None if the device does not draft.
    """
    drafter: bool = False
    """Whether that proposer is a drafter model, which may draft in every step."""
    drawn_drafts: bool = False
    """Whether the drafter draws its drafts for requests that sample."""
    host_drafts: bool = False
    """Whether drafts come from the host."""
    reads_before_decoding: bool = False
    """Whether the host has to read every result before it launches the next decode step, because
    it drafts or accepts."""

    prefill_budget: int = 2048
    """Most prompt tokens, including padding, that are read between two decode steps."""
    admitted_at_once: int = 1
    """Most requests that one program gives their slots: as many as one program reads prompts of."""
    beside: int = 0
    """Prompt tokens that a decode step may also read; 0 if prompts are only read between decode
    steps."""
    prefix_caching: bool = False
    """Whether requests whose texts begin alike share pages."""
    saves_every: int = 0
    """States of recurrent layers are saved at multiples of so many tokens; 0 if none are saved."""
    num_snapshots: int = 0
    """How many saved states there is room for."""
    recalls: bool = False
    """Whether a proposer must be given the tokens of shared pages when a request begins after
    these."""
    looks_ahead: int = 0
    """Number of tokens after a page on which the proposers' entries in it depend."""

    @property
    def first_snapshot(self) -> int:
        """The row of the first saved state, after those of the slots and of the padding slot."""
        return self.num_slots + 1

    @property
    def max_pages(self) -> int:
        """Columns of the page table: the most pages that one request can hold."""
        return -(-self.positions // self.page_size)

    @property
    def recalled_positions(self) -> int | None:
        """Room for the cached tokens that a request begins with; None if no proposer needs them."""
        return self.positions if self.recalls else None

    @property
    def positions(self) -> int:
        """The most positions that one request can write."""
        return self.max_model_len + self.block_size

    def widths_of(self, batch: int) -> tuple[int, ...]:
        """The widths to choose from for steps of this batch size; empty if there is no choice."""
        return self.widths if batch >= self.adapts_from else ()

    def choices_of(self, batch: int) -> tuple[Width, ...]:
        """The widths of steps of this batch size, those that share out their tokens in both forms:
        even as well; empty if there is no choice."""
        narrower = self._sharing_widths(batch)
        return tuple(
            choice
            for width in self.widths_of(batch)
            for choice in ((width, Even(width)) if width in narrower else (width,))
        )

    def positions_of(self, length_limit: int) -> int:
        """Positions that a request can write until it has `length_limit` committed tokens,
        including a last block that begins there."""
        return length_limit + self.block_size

    def decode_programs(
        self, batch: int, width: Width, host_drafts: bool, draws: bool
    ) -> DecodePrograms:
        """The programs of a step of this width. Requests that share out tokens draft some more."""
        lockstep, whole, drafting = self.driver == "lockstep", self.exact or host_drafts, None
        each = self.width if whole else width.each if isinstance(width, Even) else width
        if width != 1:
            assert self.proposer is not None, "no device proposer drafts for this engine"
            num_tokens = None if whole else self._shared_tokens(batch, width)
            each = each if num_tokens is None else drafted_width(each, self.width)
            drafting = Drafting(self.proposer, each, draws and self.drawn_drafts, num_tokens)
        return DecodePrograms(
            batch=batch,
            width=each,
            drafting=drafting,
            host_drafts=host_drafts,
            draws=draws or self.exact,
            apart=whole or lockstep,
            accepts_on_host=lockstep,
        )

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Batch sizes of steps that also read a prompt. The prompt's slot and a free one are never
        in their batch."""
        if not self.beside:
            return ()
        sizes, most = self.shapes.batch_sizes, self.num_slots - NOT_DECODING
        last = min((size for size in sizes if size >= most), default=most)
        return tuple(size for size in sizes if size <= last)

    def mixed_widths(self, batch: int) -> tuple[int, ...]:
        """Widths of steps of this batch size that also read a prompt, all of them with drafts if
        the device drafts at all. In its rows a prompt takes as many places as the drafts, so
        narrower steps are those that share out their tokens, without padding."""
        return (*self._sharing_widths(batch), self.width)

    def mixed_programs(self, batch: int, width: int, draws: bool) -> DecodePrograms:
        """The program of a step that also reads `beside` tokens of a prompt. It drafts what a step
        does that reads none."""
        assert self.beside, "no step reads prompts beside the requests"
        programs = self.decode_programs(batch, width, host_drafts=False, draws=draws)
        return dataclasses.replace(programs, beside=self.beside)

    def _sharing_widths(self, batch: int) -> tuple[int, ...]:
        """The narrower widths with drafts whose steps share out their tokens."""
        narrower = self.widths_of(batch)[1:-1]
        return tuple(width for width in narrower if self._shared_tokens(batch, width) is not None)

    def _shared_tokens(self, batch: int, width: Width) -> int | None:
        """Tokens of a step that shares them out among its requests, rounded up to a multiple of 8
        for the kernels; None if each request has `width` of its own."""
        if not self.shares_tokens or batch == 1 or isinstance(width, Even) or width == self.width:
            return None
        in_eights = -(-batch * width // 8) * 8
        return in_eights if in_eights < batch * self.width else None

    def every_decode(self, draws: bool, only_needed: bool = False) -> Iterator[DecodePrograms]:
        """Every result that `decode_programs` and `mixed_programs` can return. `only_needed` leaves
        out steps without drafts if the drafter drafts in every step unless a request opts out."""
        for batch in self.shapes.batch_sizes:
            choices = self.choices_of(batch)
            drafted = () if self.proposer is None else choices[1:] or (self.width,)
            always = self.drafter and not choices and not self.exact
            for host_drafts in (False, True) if self.host_drafts else (False,):
                programs = (
                    self.decode_programs(batch, width, host_drafts, draws)
                    for width in (1, *drafted)
                    if width != 1 or host_drafts or not (only_needed and always)
                )
                yield from dict.fromkeys(programs)
        for batch in self.mixed_sizes:
            for width in self.mixed_widths(batch):
                yield self.mixed_programs(batch, width, draws)


def shapes_for(max_batch: int, prefill_chunk: int, exact: bool, width: int = 1) -> Shapes:
    """Batch sizes are powers of two up to `max_batch`, and sizes halfway between two of them if a
    step of `width` tokens per request is so large that each further request makes it take longer.
    With `exact` there is one shape per phase."""
    if exact:
        return Shapes((max_batch,), ((1, prefill_chunk),))
    powers = [2**i for i in range((max_batch - 1).bit_length())]
    halfway = [3 * b // 2 for b in powers if b * width >= WEIGHTS and 2 * b <= max_batch]
    sizes = sorted({*powers, *halfway, max_batch})
    batch = min(max_batch, 4)
    narrow = min(prefill_chunk, 64)
    prefill = {(1, narrow), (1, prefill_chunk), (batch, narrow), (batch, prefill_chunk)}
    prefill.add((min(max_batch, 2), prefill_chunk))  # two narrow ones take as long as four
    by_tokens = sorted(prefill, key=lambda shape: (shape[0] * shape[1], shape[1]))
    return Shapes(tuple(sizes), tuple(by_tokens))
