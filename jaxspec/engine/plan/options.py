"""What the maker of an engine may choose."""

import dataclasses

from jaxspec.acceptance.synthetic import Acceptance
from jaxspec.engine.plan.conflicts import refuse_conflicts
from jaxspec.errors import UsageError
from jaxspec.proposers.options import SpeculationOptions

DRIVERS = ("auto", "lockstep", "overlapped")


@dataclasses.dataclass(frozen=True)
class EngineOptions(SpeculationOptions):
    """What the maker of an engine may choose."""

    method: str = "auto"
    """A name of `METHODS`, or auto: dflash where a drafter is given, else none."""
    max_batch: int = 8
    """Requests that run at once."""
    max_model_len: int = 4096
    """Tokens of prompt and output together; less where a model was made for less."""
    page_size: int = 64
    """Positions per page."""
    num_pages: int | None = None
    """Pages for requests; None takes what memory_fraction leaves, no more than can be used."""
    memory_fraction: float = 0.9
    """Share of the device memory that JAX may have which weights, programs and pools take."""
    exact: bool = False
    """Run every phase through one program, so that bits do not depend on the company."""
    adaptive: bool = False
    """Choose in every step how many of the drafter's drafts to verify, from what was accepted and
    from step times that are measured first. Without a drafter it does nothing."""
    seed: int = 0
    """Where seeds of sampled requests that name none come from."""
    prefill_chunk: int = 512
    """Prompt tokens read in one step at most, per request."""
    batch_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are compiled for, rising, the last one max_batch; None takes
    powers of two."""
    prefill_shapes: tuple[tuple[int, int], ...] | None = None
    """Sizes (batch, tokens per prompt) that prefill steps are compiled for, by rising number of
    tokens; None takes four."""
    driver: str = "auto"
    """lockstep, overlapped, or auto: overlapped on an accelerator."""
    synthetic_acceptance: Acceptance | None = None
    """For benchmarks: a mean acceptance length, or the share of steps that accept each place. It is
    drawn, drafts are not compared, and the text is not the target's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_batch", "max_model_len", "page_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1")
        refuse_conflicts(self)
        if self.batch_sizes is not None and max(self.batch_sizes, default=0) > self.max_batch:
            raise UsageError(
                f"batch_sizes is {self.batch_sizes}; expected sizes up to max_batch, which is "
                f"{self.max_batch}"
            )
        if self.num_pages is not None and self.num_pages < 1:
            raise UsageError(f"num_pages is {self.num_pages}; expected None or at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(
                f"memory_fraction is {self.memory_fraction}; expected a number in (0, 1]"
            )
