"""The public engine: prompts in, text out, speculation underneath."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from jaxspec.acceptance.synthetic import SyntheticAcceptance
from jaxspec.engine.plan.options import EngineKeywords, EngineOptions, options_of
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.output import RequestOutput, output_of
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.schedule.observer import StepObserver
from jaxspec.engine.setup.build import build_loop
from jaxspec.engine.setup.load_models import DEFAULT_DTYPE, choose_dtype, open_models
from jaxspec.engine.setup.memory import peak_bytes
from jaxspec.engine.setup.warmup import compile_side_by_side, every_program, for_first_prompts
from jaxspec.engine.stats.acceptance import PooledStats, pool
from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.stats.latencies import Latencies, with_request
from jaxspec.engine.step.device import Device, Program
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.proposers.device import Params
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Int[np.ndarray | jax.Array, " tokens"]


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """What one step added to one of the prompts."""

    index: int
    """Which prompt."""
    token_ids: tuple[int, ...]
    text: str
    output: RequestOutput | None
    """The whole, with the last event of a prompt; None before."""


class Engine:
    """A target, perhaps a drafter, and the requests that they work on."""

    def __init__(
        self,
        loop: Loop,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        chat_template: ChatTemplate | None = None,
        models: Models | None = None,
    ):
        """Use `from_pretrained`, or `from_models` with models and parameters in hand."""
        self.loop = loop
        self.models = models or loop.device.models
        """As they were given; the engine may add proposers that have no weights."""
        self.tokenizer = tokenizer
        self.options = options
        self.chat_template = chat_template
        self._submitted = 0
        self._finished = PooledStats()
        self._latencies = Latencies()

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
        **changes: Unpack[EngineKeywords],
    ) -> "Engine":
        """Opens folders or hub ids.

        `block_size` overrides the drafter's own; `revision` is the target's branch, tag or commit.
        All other keywords are fields of `EngineOptions`, and change those of `options`.
        """
        checked = options_of(options, changes)
        floats = choose_dtype(dtype)
        opened = open_models(target, draft, checked.method, floats, block_size, revision)
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
        """From modules and their parameters; without a tokenizer, prompts are token ids."""
        checked = options_of(options, changes)
        loop = build_loop(models, params, tokenizer, checked)
        return cls(loop, tokenizer, checked, models=models)

    def plain(self) -> "Engine":
        """An engine over the same parameters that decodes without drafting."""
        options = dataclasses.replace(
            self.options, method="none", num_pages=self.total_pages, driver=self.plan.driver
        )
        loop = build_loop(self.models, self.params, self.tokenizer, options)
        return type(self)(loop, self.tokenizer, options, self.chat_template, self.models)

    @property
    def plan(self) -> Plan:
        """Sizes and choices that no request changes."""
        return self.loop.plan

    @property
    def params(self) -> Params:
        """Parameters of every model by name."""
        return self.loop.device.params

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.plan.max_model_len

    @property
    def free_pages(self) -> int:
        return len(self.loop.book.free)

    @property
    def total_pages(self) -> int:
        return self.loop.book.total

    @overload
    def generate(
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
        """Continues one prompt or many; one output for one prompt, a list for a list."""
        several, is_one = _listed(prompts)
        outputs = {e.index: e.output for e in self.stream(several, params) if e.output is not None}
        if is_one:
            return outputs[0]
        return [outputs[index] for index in range(len(outputs))]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Increments, as they are accepted. Leaving the iteration ends what is still running."""
        prompts, _ = _listed(prompts)
        params = _one_per_prompt(params, len(prompts))
        events = self._events([self._request(*pair) for pair in zip(prompts, params, strict=True)])
        next(events)  # Begun, so that it cleans up even if nobody ever reads from it.
        return events

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues one prompt for `step` to work on; its id."""
        request = self._request(prompt, params or SamplingParams())
        self._queue(request)
        return request.id

    def step(self, ids: Iterable[int]) -> list[StreamEvent]:
        """One step for everybody; tells what these submitted requests got, by id as index."""
        if not self.loop.idle:
            self.loop.step()
        events = [self._event(i.request, i) for i in self.loop.take_increments(ids)]
        for event in events:
            if event.output is not None:
                self.loop.forget(event.index)
        return events

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these submitted requests now; nothing more is reported of them."""
        ids = set(ids)
        self.loop.abort(ids)
        for id in ids:
            self.loop.forget(id)

    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            waiting=len(self.loop.waiting),
            running=len(self.loop.running),
            pages_in_use=self.total_pages - self.free_pages,
            pages_total=self.total_pages,
            peak_memory_bytes=peak_bytes(),
            finished=self._finished,
            latencies=self._latencies,
        )

    def warm_up(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        params: SamplingParams | None = None,
    ) -> int:
        """Compiles programs side by side before they are needed, and returns how many.

        With prompts, what their first steps need; without, everything that the engine can need
        for requests like `params`.
        """
        params = params or SamplingParams()
        plan = self.plan
        if prompts is not None:
            plan = for_first_prompts(plan, self._that_fit(_listed(prompts)[0], params))
        return compile_side_by_side(self.programs(params.draws, only_needed=True, plan=plan))

    def programs(
        self, draws: bool, only_needed: bool = False, plan: Plan | None = None
    ) -> Iterator[Program]:
        """Every program that the engine can run, traced; `draws` is for requests that sample or
        want log probabilities. `only_needed` leaves out steps that only run if a request opts out
        of drafting."""
        return every_program(self.loop.device, plan or self.plan, draws, only_needed)

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Has an observer watch every step and program meanwhile."""
        watched = (self.loop.observers, self.loop.device.observers)
        for observers in watched:
            observers.append(observer)
        try:
            yield
        finally:
            for observers in watched:
                observers.remove(observer)

    @contextmanager
    def borrow_device(self) -> Iterator[Device]:
        """The device of an engine without requests, to run steps on by hand. Whatever they leave in
        the slots is cleared afterwards."""
        self.loop.read_results()  # a step that was launched before the last reply was read
        if not self.loop.idle:
            raise UsageError("the engine has requests; borrow its device when they have ended")
        device = self.loop.device
        try:
            yield device
        finally:
            state = device.state
            assert state is not None, "the device was given back without a state"
            empty = {
                name: jnp.zeros_like(getattr(state, name))
                for name in ("page_table", "lengths", "limits")
            }
            device.state = dataclasses.replace(state, **empty)

    @property
    def num_decoding(self) -> int:
        """Running requests that have their first token."""
        return sum(bool(request.token_ids) for request in self.loop.running.values())

    def set_synthetic_acceptance(self, acceptance: SyntheticAcceptance) -> None:
        """Changes the rates at which an engine with synthetic acceptance accepts drafts. They are
        data of its programs: nothing is compiled again."""
        if not self.loop.device.models.synthetic:
            raise UsageError("the engine was made without synthetic_acceptance; make it with some")
        self.loop.device.params = self.params | {"synthetic": acceptance.on_device}

    def _that_fit(self, prompts: list[Prompt], params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of the prompts that can ever run; if none can, the first one's refusal."""
        requests = [self._request_of(0, prompt, params) for prompt in prompts]
        refusals = [self._never_fits(request) for request in requests]
        if refusals and all(refusals):
            raise UsageError(str(refusals[0]))
        return [r.prompt for r, refusal in zip(requests, refusals) if refusal is None]

    def _events(self, requests: list[Request]) -> Iterator[StreamEvent | None]:
        """Queues these requests, yields None, then steps until every one of them has ended and
        tells of theirs alone."""
        indices = {request.id: index for index, request in enumerate(requests)}
        live = set(indices)
        try:
            for request in requests:
                self._queue(request)
            yield None
            while live:
                for increment in self.loop.take_increments(live):
                    if increment.finish_reason is not None:
                        live.discard(increment.request)
                    yield self._event(indices[increment.request], increment)
                if live:
                    self.loop.step()
        finally:
            self.abort(indices)

    def _event(self, index: int, increment: Increment) -> StreamEvent:
        output = None
        if increment.finish_reason is not None:
            finished = self.loop.finished[increment.request]
            synthetic = self.loop.device.models.synthetic
            output = output_of(finished, self.plan.block_size - 1, synthetic)
            self._finished = pool([output.stats], self._finished)
            self._latencies = with_request(self._latencies, output.stats)
        return StreamEvent(index, increment.token_ids, increment.text, output)

    def _queue(self, request: Request) -> None:
        if refusal := self._never_fits(request):
            self.loop.refuse(request, refusal)
        else:
            self.loop.submit(request)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._submitted += 1
        return self._request_of(self._submitted, prompt, params)

    def _request_of(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        eos = () if params.ignore_eos else self.models.target.eos_token_ids
        return Request(
            id=number,
            prompt=self._token_ids(prompt),
            params=params,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=(self.options.seed + number) % 2**32 if params.seed is None else params.seed,
            stream=TextStream(),
            scan=stop_scan(params.stop),
            submitted_at=time.perf_counter(),
        )

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("the prompt is text but the engine has no tokenizer; give ids")
            prompt = self.tokenizer.encode(prompt, add_special_tokens=True)
        prompt = _from_array(prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            found = type(prompt).__name__
            raise UsageError(f"a prompt is of type {found}; expected text or token ids")
        if not len(prompt):
            raise UsageError("the prompt is empty; expected at least one token")
        if wrong := [token for token in prompt if not isinstance(token, Integral)]:
            raise UsageError(f"the prompt has {wrong[0]!r} among its token ids; expected integers")
        vocab_size = self.models.target.vocab_size
        if not all(0 <= token < vocab_size for token in prompt):
            raise UsageError(f"the prompt has ids outside the vocabulary of {vocab_size} tokens")
        return tuple(int(token) for token in prompt)

    def _never_fits(self, request: Request) -> str | None:
        """Why no wait would help this request; its neighbours go on without it."""
        plan, book = self.loop.plan, self.loop.book
        tokens = len(request.prompt) + request.params.max_tokens
        if tokens > plan.max_model_len:
            by_models = plan.max_model_len < self.options.max_model_len
            remedy = "the models were made for no more" if by_models else "or raise max_model_len"
            return (
                f"prompt of {len(request.prompt)} and max_tokens {request.params.max_tokens} make "
                f"{tokens} tokens, the context holds {plan.max_model_len}; shorten one of them, "
                f"{remedy}"
            )
        needed = book.pages_for(request.length_limit + plan.block_size)
        if needed > book.total:
            return (
                f"the request needs {needed} pages of {plan.page_size} positions, the pool has "
                f"{book.total}; shorten it or raise num_pages or memory_fraction"
            )
        return None


def _listed(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """All prompts, and whether it is one alone: a text, or a sequence of token ids."""
    prompts = _from_array(prompts)
    if isinstance(prompts, str | bytes):
        return [prompts], True
    if not isinstance(prompts, Iterable):
        found = type(prompts).__name__
        raise UsageError(f"prompts are of type {found}; expected text, token ids or many of them")
    several = list(prompts)
    if several and isinstance(several[0], Integral):
        return [several], True
    return several, False


def _from_array(prompt: Any) -> Any:
    """Arrays, on a device or not, as lists: their elements are no integers of Python."""
    return np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else prompt


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not all(isinstance(one, SamplingParams) for one in params):
        raise UsageError(f"sampling params are {params!r}; expected SamplingParams, one or a list")
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling params for {count} prompts; give one or {count}")
    return list(params)
