"""The methods of an engine that take prompts or chats and return text."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack, overload

from jaxspec.engine.event_stream import EventStream, StreamEvent
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.chats import ChatOptions, Messages, as_chats, need_template, read_chat
from jaxspec.engine.requests.failures import Errors, check_errors, failure_of, raise_refusals
from jaxspec.engine.requests.output import RequestOutput, output_of
from jaxspec.engine.requests.prompts import Prompt, ReadPrompt, as_list, read_prompt
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.requests.sampling_keywords import (
    SamplingKeywords,
    SomeParams,
    params_for_each,
)
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.schedule.refusals import never_fits
from jaxspec.engine.step.io import Models
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class TextGeneration:
    """What an engine does for its callers.

    In all methods, sampling parameters may be given as a `SamplingParams`, under the name `params`
    or, as in vLLM, `sampling_params`; as a list with one for each prompt; or as keywords, which
    override the fields of those.

    With `errors="raise"`, requests that can never run raise a UsageError before any request runs,
    and requests that fail while they run raise a RequestFailed after all others have ended. With
    `errors="return"`, both have outputs whose `finish_reason` is "error" and whose `error` says
    why.
    """

    loop: Loop
    models: Models
    """The models as the caller passed them; the engine may add proposers without weights."""
    tokenizer: Tokenizer | None
    options: EngineOptions
    chat_template: ChatTemplate | None
    _numbers: Iterator[int]

    # A text or a list of ids is an Iterable too; the first overload that fits is taken.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: Prompt,
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> RequestOutput | list[RequestOutput]:
        """Continues one prompt or many, as they are. Returns one output for a single prompt, else
        a list in the order of the prompts. For a chat model, see `chat`."""
        several, is_one = as_list(prompts)
        each = params_for_each(len(several), params, sampling_params, keywords)
        outputs = self._outputs(self._read(several), each, errors, of_list=not is_one)
        return outputs[0] if is_one else outputs

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> EventStream:
        """Iterates over new tokens and text, step by step. Closing the iterator aborts the rest."""
        several, is_one = as_list(prompts)
        each = params_for_each(len(several), params, sampling_params, keywords)
        read = self._read(several)
        return self._stream(read, each, errors, of_list=not is_one, raises=errors == "raise")

    @overload
    def chat(
        self,
        messages: Messages,
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Iterable[Messages],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one chat, a list of messages, or many, with the chat template of the model.

        `enable_thinking` is None for the template's own default. `chat_template_kwargs` are more
        variables for the template, and override the other arguments.
        """
        chats, is_one = as_chats(messages)
        each = params_for_each(len(chats), params, sampling_params, keywords)
        options = ChatOptions(
            tools, add_generation_prompt, enable_thinking, chat_template_kwargs or NO_VARIABLES
        )
        read = self._read_chats(chats, options)
        outputs = self._outputs(read, each, errors, of_list=not is_one)
        return outputs[0] if is_one else outputs

    def stream_chat(
        self,
        messages: Messages | Iterable[Messages],
        params: SomeParams | None = None,
        *,
        sampling_params: SomeParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
        **keywords: Unpack[SamplingKeywords],
    ) -> EventStream:
        """Like `chat`, and iterates over new tokens and text like `stream`."""
        chats, is_one = as_chats(messages)
        each = params_for_each(len(chats), params, sampling_params, keywords)
        options = ChatOptions(
            tools, add_generation_prompt, enable_thinking, chat_template_kwargs or NO_VARIABLES
        )
        read = self._read_chats(chats, options)
        return self._stream(read, each, errors, of_list=not is_one, raises=errors == "raise")

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> int:
        """Queues one prompt for `step` to work on, and returns its id. A request that can never run
        raises a UsageError; one that fails in a step says so in its output."""
        each = params_for_each(1, params, sampling_params, keywords)
        [request], refusals = self._requests(self._read([prompt]), each)
        raise_refusals(refusals, of_list=False)
        try:
            self.loop.submit([request], [None])
            return request.id
        except BaseException:
            self.abort(request.id)
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

    def abort(self, ids: int | Iterable[int]) -> None:
        """Ends submitted requests, one or several, now; `step` returns no more events for them."""
        self.loop.abandon([ids] if isinstance(ids, int) else ids)

    def _outputs(
        self,
        prompts: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        errors: Errors,
        of_list: bool,
    ) -> list[RequestOutput]:
        stream = self._stream(prompts, params, errors, of_list, raises=False)
        outputs = {e.index: e.output for e in stream if e.output is not None}
        if errors == "raise" and (failure := failure_of(outputs, len(prompts))):
            raise failure
        return [outputs[index] for index in range(len(outputs))]

    def _stream(
        self,
        prompts: Sequence[ReadPrompt],
        params: Sequence[SamplingParams],
        errors: Errors,
        of_list: bool,
        raises: bool,
    ) -> EventStream:
        check_errors(errors)
        requests, refusals = self._requests(prompts, params)
        if errors == "raise":
            raise_refusals(refusals, of_list)
        ids = [request.id for request in requests]
        stream = EventStream(self.loop, self._event, ids, raises)
        try:
            self.loop.submit(requests, refusals)
            return stream
        except BaseException:
            stream.close()
            raise

    def _event(self, index: int, increment: Increment) -> StreamEvent:
        output = None
        if increment.ended is not None:
            synthetic = self.loop.device.models.synthetic
            output = output_of(increment.ended, self.loop.plan.block_size - 1, synthetic)
        return StreamEvent(index, increment.token_ids, increment.text, output)

    def _read(self, prompts: Sequence[Prompt]) -> list[ReadPrompt]:
        vocab_size = self.models.target.vocab_size
        return [read_prompt(prompt, self.tokenizer, vocab_size) for prompt in prompts]

    def _read_chats(self, chats: Sequence[Messages], options: ChatOptions) -> list[ReadPrompt]:
        template = need_template(self.chat_template, self.tokenizer)
        vocab_size = self.models.target.vocab_size
        return [read_chat(one, template, self.tokenizer, vocab_size, options) for one in chats]

    def _requests(
        self, prompts: Sequence[ReadPrompt], params: Sequence[SamplingParams]
    ) -> tuple[list[Request], list[str | None]]:
        """The requests, and for each of them why it can never run, or None."""
        self.loop.refuse_if_closed()
        pairs = zip(prompts, params, strict=True)
        requests = [self._request(next(self._numbers), *pair) for pair in pairs]
        reasons = [one.refusal or self._refusal(r) for one, r in zip(prompts, requests)]
        return requests, reasons

    def _request(self, number: int, prompt: ReadPrompt, params: SamplingParams) -> Request:
        eos = () if params.ignore_eos else self.models.target.eos_token_ids
        return Request(
            id=number,
            prompt=prompt.ids,
            text_prompt=prompt.text,
            params=params,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=(self.options.seed + number) % 2**32 if params.seed is None else params.seed,
            stream=TextStream(),
            scan=stop_scan(params.stop),
            submitted_at=time.perf_counter(),
            draws=params.draws,
        )

    def _refusal(self, request: Request) -> str | None:
        if request.params.stop and self.tokenizer is None:
            return "stop needs text but the engine has no tokenizer; use stop_token_ids"
        limit = self.options.max_model_len
        return never_fits(request, self.loop.plan, self.loop.ledger.book, limit)
