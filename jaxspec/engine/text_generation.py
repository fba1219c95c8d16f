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
    """What an engine does for its callers.

    In all methods, sampling parameters may be given as a `SamplingParams`, under the name `params`
    or, as in vLLM, `sampling_params`; as a list with one for each prompt; or as keywords, which
    override the fields of those.

    With `errors="raise"`, requests that can never run raise a UsageError before any request runs,
    and requests that fail while they run raise a RequestFailed after all others have ended. With
    `errors="return"`, both have outputs whose `finish_reason` is "error" and whose `error` says
    why.
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
        return self._submit(self._read([prompt]), each)[0]

    def submit_all(self, prompts: Sequence[Prompt], params: SomeParams | None = None) -> list[int]:
        """Queues prompts for `step` to work on, all in one turn, and returns their ids. `params`
        are those of all prompts, or a list with those of each. If one of them can never run, a
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
        """The text and the token ids that `chat` gives to the model for one chat. Raises a
        UsageError if the messages are wrong. Nothing is queued, and no turn is waited for."""
        options = ChatOptions(
            tools, add_generation_prompt, enable_thinking, chat_template_kwargs or NO_VARIABLES
        )
        [prompt] = self._read_chats([messages], options)
        raise_refusals([prompt.refusal], of_list=False)
        return prompt

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
