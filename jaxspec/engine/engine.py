"""The public engine: prompts in, text out, speculation underneath."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import jax
from jax.typing import DTypeLike

from jaxspec.acceptance.synthetic import MixedAcceptance, SyntheticAcceptance
from jaxspec.checkpoint.fp8_config import Quantization
from jaxspec.engine.plan.kernels import log_kernels, refuse_device
from jaxspec.engine.plan.options import EngineKeywords, EngineOptions, options_of
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.prompts import Prompt, as_list
from jaxspec.engine.requests.sampling_keywords import SamplingKeywords, params_for_each
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Busy, Loop
from jaxspec.engine.setup.ahead import Ahead, wants_ahead
from jaxspec.engine.setup.build import build_loop
from jaxspec.engine.setup.describe import engine_in_words
from jaxspec.engine.setup.kernels_used import kept_kernel_uses
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.memory import peak_bytes
from jaxspec.engine.setup.placement import with_synthetic
from jaxspec.engine.setup.rehearsal import first_runs_are_slow, rehearse
from jaxspec.engine.setup.warmup import compile_side_by_side, every_program, for_first_prompts
from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.step.compiled import Program
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.engine.text_generation import TextGeneration
from jaxspec.errors import UsageError
from jaxspec.proposers.device import Params
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer


class Engine(TextGeneration):
    """Generates text for many requests at once, with a target model and optionally a drafter.

    `from_pretrained` makes an engine, or `from_models` if models and parameters are in memory.
    `close`, or the end of a `with` block, frees its memory on the device.
    """

    def __init__(
        self,
        loop: Loop,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        chat_template: ChatTemplate | None = None,
        models: Models | None = None,
    ):
        """Not for callers: use `from_pretrained` or `from_models`."""
        self.loop = loop
        self.models = models or loop.device.models
        self.tokenizer = tokenizer
        self.options = options
        self.chat_template = chat_template
        self.kernels = kept_kernel_uses(loop.device.models, loop.plan, loop.device.store)
        """For each op of the models, what runs it and, if that is no kernel, the reason."""
        log_kernels(self.kernels)
        self._ahead = Ahead(loop.plan, wants_ahead(options.compile_ahead))
        self._numbers = itertools.count(1)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        options: EngineOptions | None = None,
        *,
        dtype: DTypeLike = "auto",
        quantization: Quantization = None,
        draft_quantization: Quantization = None,
        block_size: int | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        **changes: Unpack[EngineKeywords],
    ) -> "Engine":
        """Makes an engine for models that are given as folders or hub ids.

        `dtype` is "bfloat16", "float32", or "auto": float32 for the demo pair on a CPU, and
        bfloat16 otherwise. `quantization="fp8"` rounds the matrices of the target's layers to 8
        bits while they are read; a target that is stored in FP8 stays as it is.
        `draft_quantization="fp8"` does the same to the drafter, and gives it a copy of the head in
        8 bits to draft with. `block_size` overrides the drafter's own. `revision` is the branch,
        tag or commit of the target, and `draft_revision` that of the drafter. `progress` is called
        with the bytes of weights that were read so far, and with their total. All other keywords
        are fields of `EngineOptions`; they override those of `options`.
        """
        checked = options_of(options, changes)
        refuse_device(checked)
        opened = open_models(
            target,
            draft,
            method=checked.method,
            dtype=dtype,
            quantization=quantization,
            draft_quantization=draft_quantization,
            block_size=block_size,
            revision=revision,
            draft_revision=draft_revision,
            progress=progress,
            tensor_parallel_size=checked.tensor_parallel_size,
        )
        loop = build_loop(opened.models, opened.params, opened.tokenizer, checked)
        return cls(loop, opened.tokenizer, checked, opened.chat_template, opened.models)

    @classmethod
    def from_models(
        cls,
        models: Models,
        params: Params,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        *,
        chat_template: ChatTemplate | None = None,
        **changes: Unpack[EngineKeywords],
    ) -> "Engine":
        """Makes an engine from modules and their parameters, for example those of `open_models`.
        Without a tokenizer, prompts must be token ids."""
        checked = options_of(options, changes)
        loop = build_loop(models, params, tokenizer, checked)
        return cls(loop, tokenizer, checked, chat_template, models)

    def plain(self) -> "Engine":
        """An engine over the same parameters that decodes without drafting."""
        self.loop.refuse_if_closed()
        options = dataclasses.replace(
            self.options,
            method="none",
            num_pages=self.total_pages,
            num_snapshots=self.plan.num_snapshots,
            driver=self.plan.driver,
            # These two have no effect here, and the log would warn about them.
            adaptive=False,
            memory_fraction=EngineOptions.memory_fraction,
        )
        loop = build_loop(self.models, self.params, self.tokenizer, options)
        return type(self)(loop, self.tokenizer, options, self.chat_template, self.models)

    @property
    def plan(self) -> Plan:
        """The sizes and choices that are fixed when the engine is made."""
        return self.loop.plan

    @property
    def params(self) -> Params:
        """Parameters of every model by name."""
        return self.loop.device.params

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.plan.max_model_len

    def most_tokens(self, prompt_tokens: int) -> int:
        """The largest `max_tokens` with which a prompt of this many tokens can run. It is less than
        1 if such a prompt cannot run at all."""
        pool = self.total_pages * self.plan.page_size - self.plan.positions_of(-1)
        return min(self.max_model_len, pool) - prompt_tokens

    @property
    def free_pages(self) -> int:
        """Pages that no request holds. Some of them may still serve the prefix cache."""
        return len(self.loop.current.book.free)

    @property
    def total_pages(self) -> int:
        return self.loop.ledger.book.total

    def close(self) -> None:
        """Ends all requests and frees the device memory of the state and the weights.

        Weights that you hold yourself, or that another engine uses, stay in memory. Afterwards the
        engine refuses to run anything; `close` and `stats` can still be called. If a program is
        being compiled ahead of its need, this waits for it.
        """
        self.loop.close()
        self._ahead.end()

    @property
    def is_compiling_ahead(self) -> bool:
        """Whether the engine is compiling programs that no request needs yet."""
        return self._ahead.is_at_work

    def __enter__(self) -> "Engine":
        self.loop.refuse_if_closed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return engine_in_words(self.loop)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's load, memory and statistics."""
        now = self.loop.current
        return EngineStats(
            waiting=len(now.waiting),
            running=len(now.running),
            pages_in_use=now.book.total - len(now.book.free),
            pages_total=now.book.total,
            peak_memory_bytes=peak_bytes(),
            finished=now.finished,
            latencies=now.latencies,
            kernels=self.kernels,
            prefix_cache_queries=now.prefix_cache_queries,
            prefix_cache_hits=now.prefix_cache_hits,
        )

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running requests are not affected."""
        self.loop.reset_prefix_cache()

    def warm_up(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] | None = None,
        sampling_params: SamplingParams | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> int:
        """Loads or compiles programs before they are needed, and returns their number.

        If prompts are given, these are the programs that the first steps of such prompts need;
        otherwise all that requests with these `params` can need. On a GPU the latter are also run,
        unless the engine has requests; this empties the prefix cache. `progress` is called with the
        number of programs that are ready and the number that are known so far. `sampling_params` is
        another name for `params`.
        """
        self.loop.refuse_if_closed()
        [params] = params_for_each(1, params, sampling_params, keywords)
        plan = self.plan
        if prompts is not None:
            plan = for_first_prompts(plan, self._that_fit(as_list(prompts)[0], params))
        scores = params.prompt_logprobs is not None
        programs = self.programs(params.draws, only_needed=True, plan=plan, scores=scores)
        count = compile_side_by_side(programs, progress)
        if prompts is None and first_runs_are_slow():
            with suppress(Busy), self.loop.lend_device() as device:
                rehearse(device, plan, params.draws, scores)
        return count

    def programs(
        self,
        draws: bool,
        only_needed: bool = False,
        plan: Plan | None = None,
        scores: bool = False,
    ) -> Iterator[Program]:
        """Every program that the engine can run. With `draws`, requests sample or return
        log probabilities. `only_needed` leaves out programs that are only needed if a request opts
        out of drafting. `scores` adds those that return log probabilities of prompts."""
        self.loop.refuse_if_closed()
        of = self.loop.device.programs
        return every_program(of, plan or self.plan, draws, only_needed, scores)

    def trace(self, step: Step, *inputs: Any, **static: Any) -> jax.stages.Traced:
        """Traces the program of one step for inputs of these shapes, without running it."""
        self.loop.refuse_if_closed()
        return self.loop.device.program(step, *inputs, **static).traced

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Calls an observer at every step and program inside the `with` block."""
        observers = self.loop.device.observers
        try:
            observers.append(observer)
            yield
        finally:
            if observer in observers:
                observers.remove(observer)

    @contextmanager
    def borrow_device(self) -> Iterator[Device]:
        """Lends the device of an idle engine, to run steps directly. Slots are cleared afterwards,
        and the prefix cache is empty."""
        with self.loop.lend_device() as device:
            yield device

    def wait(self) -> None:
        """Waits until the device has run everything that was launched."""
        self.loop.wait()

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self.loop.current.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self.loop.current.running)

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompts have been read and that have their first token."""
        running = self.loop.current.running.values()
        return sum(request.is_prefilled and request.num_tokens > 0 for request in running)

    def set_synthetic_acceptance(self, acceptance: SyntheticAcceptance | MixedAcceptance) -> None:
        """Changes the rates at which an engine with synthetic acceptance accepts drafts. The rates
        are inputs of the programs, so nothing is compiled again unless the number of kinds of
        requests changes."""
        self.loop.refuse_if_closed()
        device = self.loop.device
        if not device.models.synthetic:
            raise UsageError("the engine was made without synthetic_acceptance; make it with some")
        device.use_params(with_synthetic(self.params, acceptance, device.models.shards.count))

    def _that_fit(self, prompts: list[Prompt], params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of the prompts that fit into the engine; raises a UsageError if none does."""
        read = self._read(prompts)
        requests = [self._request(0, one, params) for one in read]
        refusals = [one.refusal or self._refusal(r) for one, r in zip(read, requests)]
        if refusals and all(refusals):
            raise UsageError(str(refusals[0]))
        return [r.prompt for r, refusal in zip(requests, refusals) if refusal is None]
