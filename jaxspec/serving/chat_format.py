"""Answers to chats as JSON: messages and deltas, in which thinking is apart from the answer."""

from collections.abc import Sequence
from typing import Any

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.serving import reasoning
from jaxspec.serving.chat_request import ChatRequest
from jaxspec.serving.envelope import Envelope
from jaxspec.serving.events import around, escaped, event
from jaxspec.serving.mailbox import Delta
from jaxspec.serving.reasoning import Parts, ReasoningSplit
from jaxspec.serving.token_texts import TokenTexts, chat_logprobs

BLANK = "the content of the chunk"


class ChatFormat:
    """How the choices of one answer are written."""

    def __init__(
        self,
        envelope: Envelope,
        request: ChatRequest,
        split: ReasoningSplit,
        texts: TokenTexts,
        closing_token: int | None,
    ):
        """`split` is the state in which every answer begins; `closing_token` is the token that ends
        thinking, or None if no single token does."""
        self._envelope = envelope
        self._request = request
        self._begin = split
        self._texts = texts
        self._closing_token = closing_token
        self._logprobs = request.generation.logprobs
        self._completion_tokens = 0
        count = request.generation.n
        self._splits = [split] * count
        blank = {"content": BLANK}
        self._around = [
            around(envelope.chunk(_choice(i, "delta", blank), 0), BLANK) for i in range(count)
        ]
        self._unbegun = set(range(count))
        """Choices whose role has not been sent."""
        self._always_whole = self._logprobs is not None or request.generation.continuous_usage

    def piece(self, choice: int, delta: Delta) -> bytes:
        events = b""
        if choice in self._unbegun:
            self._unbegun.discard(choice)
            first = {"role": "assistant", "content": ""}
            events = self._event(_choice(choice, "delta", first))
        self._completion_tokens += len(delta.token_ids)
        return events + self._rest(choice, delta, self._next_parts(choice, delta))

    def ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._envelope.ending(outputs, self._reasoning_tokens(outputs))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self._whole(index, output) for index, output in enumerate(outputs)]
        return self._envelope.whole(choices, outputs, self._reasoning_tokens(outputs))

    def _rest(self, choice: int, delta: Delta, parts: Parts) -> bytes:
        if delta.output is None and not self._always_whole and not parts.reasoning:
            before, after = self._around[choice]
            return before + escaped(parts.content) + after if parts.content else b""
        changes = _reasoning(parts.reasoning) if self._request.include_reasoning else {}
        if parts.content:
            changes["content"] = parts.content
        if delta.output is None and not changes and not delta.logprobs:
            return b""
        written = _choice(choice, "delta", changes, delta.output)
        if self._logprobs is not None:
            written["logprobs"] = chat_logprobs(
                delta.token_ids, delta.logprobs, self._logprobs, self._texts
            )
        return self._event(written)

    def _next_parts(self, choice: int, delta: Delta) -> Parts:
        text = delta.text + self._stop_text(delta.output)
        split, parts = reasoning.feed(self._splits[choice], text)
        self._splits[choice] = split
        return _joined(parts, reasoning.finish(split)) if delta.output else parts

    def _whole(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        split, parts = reasoning.feed(self._begin, output.text + self._stop_text(output))
        parts = _joined(parts, reasoning.finish(split))
        message = {"role": "assistant", "content": parts.content}
        if self._request.include_reasoning:
            message |= _reasoning(parts.reasoning)
        written = _choice(choice, "message", message, output)
        if self._logprobs is not None:
            written["logprobs"] = chat_logprobs(
                output.token_ids, output.logprobs or (), self._logprobs, self._texts
            )
        return written

    def _stop_text(self, output: RequestOutput | None) -> str:
        if output is None or not self._request.generation.include_stop_text:
            return ""
        return output.stop_reason if isinstance(output.stop_reason, str) else ""

    def _reasoning_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        return sum(self._thought_of(output) for output in outputs)

    def _thought_of(self, output: RequestOutput) -> int:
        """How many tokens are thinking: those up to the one that ends it, all of them if none does,
        0 if the answer has no thinking."""
        split, parts = reasoning.feed(self._begin, output.text)
        if not parts.reasoning and split.mode != reasoning.THINKING:
            return 0
        if self._closing_token in output.token_ids:
            return output.token_ids.index(self._closing_token) + 1
        return len(output.token_ids) if split.mode == reasoning.THINKING else 0

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event(self._envelope.chunk(choice, self._completion_tokens))


def _choice(
    index: int, key: str, value: dict[str, Any], output: RequestOutput | None = None
) -> dict[str, Any]:
    """A choice with a message or a delta. With `output`, it also says why the choice ended."""
    choice = {"index": index, key: value, "logprobs": None, "finish_reason": None}
    if output is None:
        return choice
    return choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _reasoning(text: str) -> dict[str, Any]:
    """The thinking under the name that vLLM uses and under the one that others use."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _joined(some: Parts, more: Parts) -> Parts:
    return Parts(some.reasoning + more.reasoning, some.content + more.content)
