"""The public engine: prompts in, text out, speculation underneath."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, overload

import jax
from jax.typing import DTypeLike

from jaxspec.acceptance.synthetic import SyntheticAcceptance
from jaxspec.engine.event_stream import EventStream, StreamEvent
from jaxspec.engine.plan.kernels import kernel_uses, log_kernels, refuse_device
from jaxspec.engine.plan.options import EngineKeywords, EngineOptions, options_of
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.output import RequestOutput, output_of
from jaxspec.engine.requests.prompts import Prompt, as_list, params_per_prompt, token_ids
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.schedule.refusals import never_fits
from jaxspec.engine.setup.build import build_loop
from jaxspec.engine.setup.load_models import DEFAULT_DTYPE, choose_dtype, open_models
from jaxspec.engine.setup.memory import peak_bytes
from jaxspec.engine.setup.warmup import compile_side_by_side, every_program, for_first_prompts
from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.step.compiled import Program
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.errors import UsageError
from jaxspec.proposers.device import Params
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer


class Engine:
    """A target model, optionally a drafter, and the requests that they continue."""

    def __init__(
        self,
        loop: Loop,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        chat_template: ChatTemplate | None = None,
        models: Models | None = None,
    ):
        """Use `from_pretrained`, or `from_models` if models and parameters are in memory."""
        self.loop = loop
        self.models = models or loop.device.models
        """The models as the caller passed them; the engine may add proposers without weights."""
        self.tokenizer = tokenizer
        self.options = options
        self.chat_template = chat_template
        self.kernels = kernel_uses(loop.device.models, loop.plan)
        """What runs each op of the models, and why no kernel does where none does."""
        log_kernels(self.kernels)
        self._numbers = itertools.count(1)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        options: EngineOptions | None = None,
        *,
        dtype: DTypeLike = DEFAULT_DTYPE,
        block_size: int | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        **changes: Unpack[EngineKeywords],
    ) -> "Engine":
        """An engine for models named by folder or hub id.

        `block_size` overrides the drafter's own; `revision` is the target's branch, tag or commit,
        and `draft_revision` the drafter's. `progress` is called with how many bytes of weights were
        read, and of how many.
        All other keywords are fields of `EngineOptions` and override those of `options`.
        """
        checked = options_of(options, changes)
        floats = choose_dtype(dtype)
        refuse_device(checked.kernels)
        opened = open_models(
            target, draft, checked.method, floats, block_size, revision, draft_revision, progress
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
        **changes: Unpack[EngineKeywords],
    ) -> "Engine":
        """From modules and their parameters. Without a tokenizer, prompts must be token ids."""
        checked = options_of(options, changes)
        loop = build_loop(models, params, tokenizer, checked)
        return cls(loop, tokenizer, checked, models=models)

    def plain(self) -> "Engine":
        """An engine over the same parameters that decodes without drafting."""
        options = dataclasses.replace(
            self.options,
            method="none",
            num_pages=self.total_pages,
            driver=self.plan.driver,
            # These two would have no effect, which the log would say.
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

    @property
    def free_pages(self) -> int:
        return len(self.loop.current.book.free)

    @property
    def total_pages(self) -> int:
        return self.loop.ledger.book.total

    # A text or a list of ids is an Iterable too; the first overload that fits is taken.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: Prompt, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Continues one prompt or many. Returns one output for a single prompt, else a list."""
        several, is_one = as_list(prompts)
        outputs = {e.index: e.output for e in self.stream(several, params) if e.output is not None}
        if is_one:
            return outputs[0]
        return [outputs[index] for index in range(len(outputs))]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> "EventStream":
        """Iterates over new tokens and text, step by step. Closing the iterator aborts the rest."""
        several, _ = as_list(prompts)
        each = params_per_prompt(params, len(several))
        requests = [self._request(*pair) for pair in zip(several, each, strict=True)]
        stream = EventStream(self.loop, self._event, [request.id for request in requests])
        try:
            self._queue(requests)
            return stream
        except BaseException:
            stream.close()
            raise

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues one prompt for `step` to work on, and returns its id."""
        request = self._request(prompt, params or SamplingParams())
        try:
            self._queue([request])
            return request.id
        except BaseException:
            self.abort([request.id])
            raise

    def step(self, ids: Iterable[int]) -> list[StreamEvent]:
        """Runs one step of all requests. Returns the events of `ids`, with the id as the index."""
        increments: deque[Increment] = deque()
        try:
            self.loop.step_and_take(set(ids), increments)
            return [self._event(increment.request, increment) for increment in increments]
        except BaseException:  # the caller gets them from its next call
            self.loop.give_back(increments)
            raise

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these submitted requests now; `step` returns no more events for them."""
        self.loop.abandon(ids)

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
        )

    def warm_up(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        params: SamplingParams | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Loads or compiles programs before they are needed, and returns how many.

        With prompts, those that their first steps need; without, every program that the engine can
        need for requests with such `params`. `progress` is called with how many are ready, and of
        how many so far.
        """
        params = params or SamplingParams()
        plan = self.plan
        if prompts is not None:
            plan = for_first_prompts(plan, self._that_fit(as_list(prompts)[0], params))
        programs = self.programs(params.draws, only_needed=True, plan=plan)
        return compile_side_by_side(programs, progress)

    def programs(
        self, draws: bool, only_needed: bool = False, plan: Plan | None = None
    ) -> Iterator[Program]:
        """Every program that the engine can run. With `draws`, requests sample or return
        log probabilities. With `only_needed`, no request opts out of drafting."""
        return every_program(self.loop.device, plan or self.plan, draws, only_needed)

    def trace(self, step: Step, *inputs: Any, **static: Any) -> jax.stages.Traced:
        """Traces the program of one step for inputs of these shapes, without running it."""
        return self.loop.device.program(step, *inputs, **static).traced

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Notifies an observer of every step and program inside the `with` block."""
        observers = self.loop.device.observers
        try:
            observers.append(observer)
            yield
        finally:
            if observer in observers:
                observers.remove(observer)

    @contextmanager
    def borrow_device(self) -> Iterator[Device]:
        """The device of an idle engine, to run steps directly. Slots are cleared afterwards."""
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
        return sum(request.is_prefilled and bool(request.token_ids) for request in running)

    def set_synthetic_acceptance(self, acceptance: SyntheticAcceptance) -> None:
        """Changes the rates at which an engine with synthetic acceptance accepts drafts. They are
        data of its programs: nothing is compiled again."""
        if not self.loop.device.models.synthetic:
            raise UsageError("the engine was made without synthetic_acceptance; make it with some")
        self.loop.device.params = self.params | {"synthetic": acceptance.on_device}

    def _that_fit(self, prompts: list[Prompt], params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of the prompts that fit into the engine; raises a UsageError if none does."""
        requests = [self._request_of(0, prompt, params) for prompt in prompts]
        refusals = [self._refusal(request) for request in requests]
        if refusals and all(refusals):
            raise UsageError(str(refusals[0]))
        return [r.prompt for r, refusal in zip(requests, refusals) if refusal is None]

    def _event(self, index: int, increment: Increment) -> StreamEvent:
        output = None
        if increment.ended is not None:
            synthetic = self.loop.device.models.synthetic
            output = output_of(increment.ended, self.plan.block_size - 1, synthetic)
        return StreamEvent(index, increment.token_ids, increment.text, output)

    def _queue(self, requests: Sequence[Request]) -> None:
        self.loop.submit(requests, [self._refusal(request) for request in requests])

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return self._request_of(next(self._numbers), prompt, params)

    def _request_of(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        eos = () if params.ignore_eos else self.models.target.eos_token_ids
        return Request(
            id=number,
            prompt=token_ids(prompt, self.tokenizer, self.models.target.vocab_size),
            params=params,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=(self.options.seed + number) % 2**32 if params.seed is None else params.seed,
            stream=TextStream(),
            scan=stop_scan(params.stop),
            submitted_at=time.perf_counter(),
            draws=params.draws,
        )

    def _refusal(self, request: Request) -> str | None:
        return never_fits(request, self.plan, self.loop.ledger.book, self.options.max_model_len)
