"""The options of an engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from jaxspec.engine.plan.conflicts import refuse_conflicts
from jaxspec.errors import UsageError, hint_for
from jaxspec.layers.exchange import Exchange
from jaxspec.proposers.options import DraftSampling, Match, SpeculationOptions
from jaxspec.short_repr import changes as repr_of_changes

Driver = Literal["auto", "lockstep", "overlapped"]
DRIVERS = get_args(Driver)
Kernels = Literal["auto", "mosaic", "xla"]
Acceptance = int | float | tuple[int | float, ...]
"""A mean acceptance length, or the share of steps that accept each position."""

NAMES_ELSEWHERE = {
    "max_num_seqs": "max_batch",
    "gpu_memory_utilization": "memory_fraction",
    "max_seq_len": "max_model_len",
    "max_num_batched_tokens": "prefill_budget",
}
"""What other programs call some of the options."""


AT_LEAST_ONE = (
    "max_batch",
    "max_model_len",
    "page_size",
    "prefill_chunk",
    "prefill_budget",
    "tensor_parallel_size",
)


@dataclasses.dataclass(frozen=True, repr=False)
class EngineOptions(SpeculationOptions):
    """Options that are fixed when an engine is made."""

    method: str = "auto"
    """How drafts are made: dflash, dflash2, dspark or eagle3 (by a drafter model of that kind),
    ngram (by prompt lookup), one of the first with +ngram, none (plain decoding), or auto: the kind
    of the drafter if there is one, otherwise none."""
    max_batch: int = 8
    """Requests that run at once."""
    max_model_len: int = 4096
    """Most tokens of a prompt and its output together; less if a model was made for less."""
    page_size: int = 64
    """Positions per page of the caches."""
    num_pages: int | None = None
    """Pages of the caches; by default as many as fit into `memory_fraction`, but no more than can
    be used."""
    memory_fraction: float = 0.9
    """Share of the device memory available to JAX that weights, programs and caches may take."""
    exact: bool = False
    """Run every phase through one program of one shape, so that the bits of a request depend
    neither on the method nor on the requests beside it."""
    width: int | None = None
    """Tokens per request in a step that verifies a drafter's drafts: the newest token and the first
    drafts after it; by default the drafter's whole block."""
    adaptive: bool | None = None
    """Choose in every step how many of the drafter's drafts to verify, and of which requests, from
    recent acceptance and from step times that are measured first. Has no effect without a drafter.
    By default on a GPU only, for steps that would else verify more than 256 tokens."""
    seed: int = 0
    """Seed of the engine, from which sampled requests without a seed of their own derive one."""
    prefill_chunk: int = 512
    """Most prompt tokens of a request that one program reads."""
    prefill_budget: int = 2048
    """Most prompt tokens that are read between two decode steps, padding among them. Fewer make the
    gaps between tokens shorter, more read prompts faster. At least one program is run."""
    prefill_beside_decoding: int = 128
    """Prompt tokens that a decode step reads besides, while only short prompts wait to be read, so
    that gaps between tokens are hardly longer while prompts arrive; 0 to read prompts only between
    decode steps."""
    batch_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are compiled for, in increasing order and ending with
    `max_batch`; by default powers of two, and beyond 256 tokens in a step sizes halfway between
    them."""
    prefill_shapes: tuple[tuple[int, int], ...] | None = None
    """Sizes (batch, tokens per prompt) that prefill steps are compiled for, in increasing order of
    tokens; five sizes by default."""
    prefix_caching: bool = True
    """Share what was read between prompts that begin alike."""
    num_snapshots: int | None = None
    """For targets with recurrent layers: how many of their states are saved for prompts that begin
    alike; by default four for each request of `max_batch`, or on a GPU as many as fit into an
    eighth of the memory for caches, if that is less. With 0 there is no prefix cache."""
    driver: Driver = "auto"
    """lockstep: read the result of each step before the next is launched; overlapped: launch the
    next step first; auto: overlapped on an accelerator, lockstep on a CPU."""
    cache_dir: str | Literal[False] | None = None
    """Folder in which compiled programs are kept for the next process; by default that of the
    environment variable JAXSPEC_CACHE_DIR, or else jaxspec in the user's cache; False to keep
    none."""
    compile_ahead: bool | None = None
    """While requests run, make the programs that others may need, in a thread of its own; by
    default on an accelerator only, because on a CPU steps need its cores."""
    kernels: Kernels = "auto"
    """mosaic: run every op on its kernel for Hopper GPUs, and refuse an engine for which that is
    not possible; xla: use no kernels; auto: use each kernel that can run, and XLA elsewhere."""
    fp8_activations: bool = False
    """Round what FP8 weights are multiplied by to 8 bits too: for weights in blocks every 128
    inputs of a token with a scale of their own, else every token. By default only weights are in 8
    bits."""
    tensor_parallel_size: int = 1
    """Number of GPUs of this machine over which every layer is spread, the first ones that JAX
    sees. It must divide the numbers of heads."""
    exchange: Exchange = "psum"
    """What adds up the products of layers over several GPUs. psum: XLA's sum; mosaic: a kernel of
    our own in which GPUs write into each other's memory, which no GPU has run yet, in steps of at
    most 512 tokens, and refuse models for which that is not possible; xla: the reference of that
    kernel."""
    step_timeout: float | None = None
    """Seconds after which a step counts as stuck, because a device or another process does not
    answer: then all requests end with an error, and the engine cannot be used any more. By default
    a step may take any time. Programs that are compiled first do not count."""
    synthetic_acceptance: Acceptance | None = None
    """For benchmarks: draw how many drafts are accepted, from a mean acceptance length or from
    the share of steps that accept each position, instead of comparing drafts. The text is then not
    the target's."""

    def __repr__(self) -> str:
        return repr_of_changes(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1")
        refuse_conflicts(self)
        if self.batch_sizes is not None and max(self.batch_sizes, default=0) > self.max_batch:
            raise UsageError(
                f"batch_sizes is {self.batch_sizes}; expected sizes up to max_batch, which is "
                f"{self.max_batch}"
            )
        if self.prefill_beside_decoding < 0:
            raise UsageError(
                f"prefill_beside_decoding is {self.prefill_beside_decoding}; expected 0 or more"
            )
        if self.num_pages is not None and self.num_pages < 1:
            raise UsageError(f"num_pages is {self.num_pages}; expected None or at least 1")
        if self.num_snapshots is not None and self.num_snapshots < 0:
            raise UsageError(f"num_snapshots is {self.num_snapshots}; expected None or at least 0")
        for name, known in (("kernels", get_args(Kernels)), ("exchange", get_args(Exchange))):
            if (found := getattr(self, name)) not in known:
                raise UsageError(f"{name} is {found!r}; expected one of {', '.join(known)}")
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise UsageError(f"step_timeout is {self.step_timeout}; expected None or more than 0")
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(
                f"memory_fraction is {self.memory_fraction}; expected a number in (0, 1]"
            )


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, so that editors complete them."""

    draft_sampling: DraftSampling
    confidence_threshold: float
    num_drafts: int | None
    max_ngram: int
    min_ngram: int
    ngram_match: Match
    ngram_look_back: int
    ngram_threshold: float
    ngram_warm_up: int
    ngram_probe_every: int
    method: str
    max_batch: int
    max_model_len: int
    page_size: int
    num_pages: int | None
    memory_fraction: float
    exact: bool
    width: int | None
    adaptive: bool | None
    seed: int
    prefill_chunk: int
    prefill_budget: int
    prefill_beside_decoding: int
    batch_sizes: tuple[int, ...] | None
    prefill_shapes: tuple[tuple[int, int], ...] | None
    prefix_caching: bool
    num_snapshots: int | None
    driver: Driver
    cache_dir: str | Literal[False] | None
    compile_ahead: bool | None
    kernels: Kernels
    fp8_activations: bool
    tensor_parallel_size: int
    exchange: Exchange
    step_timeout: float | None
    synthetic_acceptance: Acceptance | None


def options_of(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """These options, or the defaults, with these fields changed."""
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    if unknown := sorted(set(changes) - set(known)):
        hint = hint_for(unknown[0], known, NAMES_ELSEWHERE)
        raise UsageError(f"unknown option {unknown[0]!r}; {hint}")
    return dataclasses.replace(options or EngineOptions(), **changes)
