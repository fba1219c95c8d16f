"""Completions as JSON: choices with texts, and log probabilities as parallel lists."""

from collections.abc import Sequence
from typing import Any

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.request import TokenLogprobs
from jaxspec.serving.completion_request import CompletionRequest
from jaxspec.serving.envelope import Envelope
from jaxspec.serving.events import around, escaped, event
from jaxspec.serving.mailbox import Delta
from jaxspec.serving.prompts import ReadText
from jaxspec.serving.token_texts import TokenTexts, completion_logprobs

BLANK = "the text of the chunk"


class CompletionFormat:
    """How the choices of one completion are written."""

    def __init__(
        self,
        envelope: Envelope,
        request: CompletionRequest,
        prompts: Sequence[ReadText],
        texts: TokenTexts,
    ):
        self._envelope = envelope
        self._request = request
        self._prompts = prompts
        self._texts = texts
        self._logprobs = request.generation.logprobs
        self._completion_tokens = 0
        count = request.generation.n * len(prompts)
        self._around = [around(envelope.chunk(_choice(i, BLANK), 0), BLANK) for i in range(count)]
        self._offsets = [0] * count
        """By choice, how many characters its tokens so far have."""
        self._echoes = {i: self._prompt(i).text for i in range(count)} if request.echo else {}
        """Texts of the prompts that are still to be sent, by choice."""
        self._always_whole = (
            self._logprobs is not None
            or request.generation.continuous_usage
            or request.generation.include_stop_text
        )

    def piece(self, choice: int, delta: Delta) -> bytes:
        self._completion_tokens += len(delta.token_ids)
        if self._request.echo and self._logprobs is not None:
            # The prompt's log probabilities come first here, but the engine returns them last.
            return self._event(self._whole(choice, delta.output)) if delta.output else b""
        text = self._echoes.pop(choice, "") + delta.text
        if delta.output is None and not self._always_whole:
            before, after = self._around[choice]
            return before + escaped(text) + after if text else b""
        if delta.output is None and not text and not delta.logprobs:
            return b""
        written = _choice(choice, text, delta.output, self._request.generation.include_stop_text)
        if self._logprobs is not None:
            written["logprobs"] = self._some_logprobs(choice, delta.token_ids, delta.logprobs)
        return self._event(written)

    def ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._envelope.ending(outputs)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self._whole(index, output) for index, output in enumerate(outputs)]
        return self._envelope.whole(choices, outputs)

    def _whole(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        echo, ids, known = "", output.token_ids, output.logprobs or ()
        if self._request.echo:
            echo = self._prompt(choice).text
        if self._request.echo and output.prompt_logprobs is not None:
            ids, known = (*output.prompt_token_ids, *ids), (*output.prompt_logprobs, *known)
        include_stop = self._request.generation.include_stop_text
        written = _choice(choice, echo + output.text, output, include_stop)
        if self._logprobs is not None:
            written["logprobs"] = self._some_logprobs(choice, ids, known)
        return written

    def _some_logprobs(
        self, choice: int, ids: Sequence[int], known: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        assert self._logprobs is not None, "log probabilities were asked for"
        offset = self._offsets[choice]
        self._offsets[choice] += sum(len(self._texts.text(id)) for id in ids)
        return completion_logprobs(ids, known, self._logprobs, self._texts, offset)

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event(self._envelope.chunk(choice, self._completion_tokens))

    def _prompt(self, choice: int) -> ReadText:
        return self._prompts[choice // self._request.generation.n]


def _choice(
    index: int, text: str, output: RequestOutput | None = None, include_stop: bool = False
) -> dict[str, Any]:
    """A choice. With `output`, it also says why the choice ended."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    if output is None:
        return choice
    if include_stop and isinstance(output.stop_reason, str):
        choice["text"] += output.stop_reason
    return choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
