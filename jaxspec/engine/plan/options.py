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
Kernels = Literal["auto", "mosaic", "portable", "xla"]
Rates = tuple[int | float, ...]
Acceptance = int | float | Rates | tuple[Rates, ...]
"""A mean acceptance length, the share of steps that accept each position, or such shares of each of
several kinds of requests."""

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
    """How drafts are made. dflash, dflash2, dspark, eagle3: by a drafter model of that kind; the
    same followed by +ngram: by the drafter and by prompt lookup; ngram: by prompt lookup alone;
    none: plain decoding without drafts; auto: the drafter's kind, or none without a drafter."""
    max_batch: int = 8
    """Most requests that run at once; the others wait."""
    max_model_len: int = 4096
    """Most tokens of a prompt and its output together. If a model was made for fewer, its own limit
    holds."""
    page_size: int = 64
    """Positions per page of the caches."""
    num_pages: int | None = None
    """Pages of the caches. By default as many as fit into `memory_fraction`, but no more than
    `max_batch` requests can use."""
    memory_fraction: float = 0.9
    """Share of the device memory available to JAX that weights, programs and caches may take."""
    exact: bool = False
    """Run every phase through one program of one shape, so that the bits of a request's results
    depend neither on the method nor on the other requests of its batch."""
    width: int | None = None
    """Tokens per request in a step that verifies drafts of a drafter: the newest token and the
    first drafts after it. By default the drafter's whole block."""
    adaptive: bool | None = None
    """Choose in every step how many of the drafter's drafts to verify, and of which requests, from
    recent acceptance and from step times that are measured when the engine is made. Has no effect
    without a drafter. By default only on a GPU, for steps that would otherwise verify more than 256
    tokens."""
    seed: int = 0
    """Sampled requests without a seed of their own get one that is derived from this one."""
    prefill_chunk: int = 512
    """Most tokens of one prompt that a single program reads."""
    prefill_budget: int = 2048
    """Most prompt tokens, including padding, that are read between two decode steps. A smaller
    number shortens the gaps between tokens, a larger one reads prompts faster. At least one program
    reads, even if it is larger than this."""
    prefill_beside_decoding: int = 128
    """Prompt tokens that a decode step also reads while only short prompts wait to be read, so that
    arriving prompts hardly lengthen the gaps between tokens. With 0, prompts are read only between
    decode steps."""
    batch_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are compiled for, in increasing order and ending with
    `max_batch`. By default powers of two and, from 256 tokens in a step on, also the sizes halfway
    between them."""
    prefill_shapes: tuple[tuple[int, int], ...] | None = None
    """Sizes (batch, tokens per prompt) that prefill steps are compiled for, in increasing order of
    tokens. By default at most five sizes."""
    prefix_caching: bool = True
    """Reuse what was computed for the common beginning of prompts instead of reading it again."""
    num_snapshots: int | None = None
    """For targets with recurrent layers: how many of their states are saved for prompts that begin
    alike. By default four for each request of `max_batch`, but on a GPU no more than fit into an
    eighth of the memory for caches. With 0 such a target has no prefix cache."""
    driver: Driver = "auto"
    """lockstep: read the result of each step before launching the next; overlapped: launch the next
    step before reading it; auto: overlapped on an accelerator, lockstep on a CPU."""
    cache_dir: str | Literal[False] | None = None
    """Folder in which compiled programs are kept for the next process. By default the one that the
    environment variable JAXSPEC_CACHE_DIR names, or else `jaxspec` in the user's cache folder.
    False keeps none."""
    compile_ahead: bool | None = None
    """While requests run, compile in a thread the programs that later requests may need. By default
    only on an accelerator, because on a CPU the steps need the cores."""
    kernels: Kernels = "auto"
    """mosaic: run every op on its kernel for Hopper GPUs, and raise an error if one of them cannot
    run; portable: the same with the kernels for every GPU since Ampere; xla: use no kernels; auto:
    use each kernel for Hopper GPUs that can run, and XLA for the other ops."""
    fp8_activations: bool = False
    """Also round the activations that FP8 weights are multiplied by to 8 bits. Each token gets one
    scale or, if the weights have a scale per block, one for every 128 of its inputs. By default
    only the weights are in 8 bits."""
    tensor_parallel_size: int = 1
    """Number of GPUs over which every layer is spread: the first that JAX sees, or those of all
    processes. It must divide the numbers of heads and key-value heads, the MLP's size and the
    vocabulary."""
    exchange: Exchange = "auto"
    """What sums the products of layers over several GPUs. psum: XLA; mosaic: for steps of at most
    512 tokens kernels in which GPUs write into each other's memory, which takes less time, and
    raise an error if they cannot run a model's layers; xla: the reference of such a kernel; auto:
    kernels where they can run and have been tried, and XLA elsewhere."""
    step_timeout: float | None = None
    """Seconds after which a step counts as stuck, because a device or another process does not
    answer. All requests then end with an error, and the engine cannot be used any more. Time for
    compiling does not count. By default a step may take any time."""
    synthetic_acceptance: Acceptance | None = None
    """For benchmarks: draw at random how many drafts are accepted instead of comparing them with
    the target's tokens. Given as a mean acceptance length, or as the share of steps that accept
    each position; a tuple of such shares is of several kinds of requests, and a request with seed s
    is of kind s modulo their number. The text is then not the target's."""

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
