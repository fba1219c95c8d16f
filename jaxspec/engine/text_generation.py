"""The methods of an engine that take prompts or chats and return text."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack, overload

from jaxspec.engine.calls import Calls
from jaxspec.engine.event_stream import EventStream, StreamEvent
from jaxspec.engine.requests.chats import ChatOptions, Messages, as_chats
from jaxspec.engine.requests.failures import Errors, raise_refusals
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.prompts import Prompt, ReadPrompt, as_list
from jaxspec.engine.requests.request import Increment
from jaxspec.engine.requests.sampling_keywords import SamplingKeywords, SomeParams, params_for_each
from jaxspec.engine.requests.sampling_params import SamplingParams

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class TextGeneration(Calls):
    """The methods of an engine that its callers generate text with.

    Sampling parameters may be given as a `SamplingParams`, named `params` or, as in vLLM,
    `sampling_params`. For several prompts, it may also be a list with one for each prompt. Keywords
    override the fields of the given parameters, or of the defaults.

    With `errors="raise"`, requests that can never run raise a UsageError before any request runs,
    and requests that fail while they run raise a RequestFailed after all others have ended. With
    `errors="return"`, such requests have outputs whose `finish_reason` is "error" and whose `error`
    says why.
    """

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
        """Continues one prompt or many, without a chat template; for a chat model, see `chat`.
        Returns one output for a single prompt, and otherwise a list in the order of the prompts."""
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
        """Returns an iterator over the tokens and text that each step adds to the prompts. Closing
        it ends the requests that still run."""
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
        """Answers one chat, which is a list of messages, or a list of chats. The model's chat
        template turns them into prompts.

        If `enable_thinking` is None, the template's own default applies. `chat_template_kwargs` are
        further variables of the template, which override the other arguments.
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
        """Like `chat`, but returns an iterator over new tokens and text, like `stream`."""
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
        """Queues one prompt for `step` to work on, and returns the id of its request. If it can
        never run, a UsageError is raised; if it fails in a step, its output says why."""
        each = params_for_each(1, params, sampling_params, keywords)
        return self._submit(self._read([prompt]), each)[0]

    def submit_all(self, prompts: Sequence[Prompt], params: SomeParams | None = None) -> list[int]:
        """Queues prompts for `step` to work on, and returns the ids of their requests. `params`
        holds for all prompts, or is a list with one entry per prompt. If a prompt can never run, a
        UsageError says which, and none is queued."""
        each = params_for_each(len(prompts), params, None, {})
        return self._submit(self._read(prompts), each)

    def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> int:
        """Like `submit`, for the messages of one chat, which `chat` describes."""
        prompt = self.chat_prompt(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._submit([prompt], params_for_each(1, params, sampling_params, keywords))[0]

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ReadPrompt:
        """The prompt that `chat` makes of one chat, as text and as token ids. Raises a UsageError
        if the messages are wrong. It queues nothing, and never waits for another thread's step."""
        options = ChatOptions(
            tools, add_generation_prompt, enable_thinking, chat_template_kwargs or NO_VARIABLES
        )
        [prompt] = self._read_chats([messages], options)
        raise_refusals([prompt.refusal], of_list=False)
        return prompt

    def step(self, ids: Iterable[int]) -> list[StreamEvent]:
        """Runs one step of all requests, and returns the events of the requests `ids`. The `index`
        of an event is then the request's id."""
        increments: deque[Increment] = deque()
        try:
            self.loop.step_and_take(set(ids), increments)
            return [self._event(increment.request, increment) for increment in increments]
        except BaseException:  # the caller gets them from its next call
            self.loop.give_back(increments)
            raise

    def abort(self, ids: int | Iterable[int]) -> None:
        """Ends one or several submitted requests now. `step` returns no more events for them."""
        self.loop.abandon([ids] if isinstance(ids, int) else ids)
