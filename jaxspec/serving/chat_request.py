"""POST /v1/chat/completions: a request for the answer to a chat."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import shown
from jaxspec.serving.fields import Fields
from jaxspec.serving.generation import Generation, read_generation, read_logprobs
from jaxspec.serving.not_built import NEUTRAL, NEUTRAL_IN_CHAT, refuse_what_is_not_built
from jaxspec.serving.refusals import bad_request

ROLES = {"developer": "system"}
"""Names of roles that templates know under another name."""


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A chat and how it becomes a prompt."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool
    """Whether the prompt ends with the beginning of an answer."""
    template_variables: Mapping[str, Any]
    """Variables for the chat template, `enable_thinking` among them if the request has it."""


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request for an answer."""

    prompt: ChatPrompt
    generation: Generation
    include_reasoning: bool
    """Whether the thinking that comes before the answer is sent."""


def read_chat_request(body: dict[str, Any]) -> ChatRequest:
    refuse_what_is_not_built(body, {**NEUTRAL, **NEUTRAL_IN_CHAT})
    fields = Fields(body)
    newer = fields.integer("max_completion_tokens", None, 1)
    max_tokens = fields.integer("max_tokens", None, 1) if newer is None else newer
    return ChatRequest(
        prompt=read_chat_prompt(fields),
        generation=read_generation(fields, max_tokens, _logprobs(fields)),
        include_reasoning=fields.flag("include_reasoning", True),
    )


def read_chat_prompt(fields: Fields) -> ChatPrompt:
    variables = fields.object("chat_template_kwargs")
    given = dict(variables.values) if variables else {}
    if effort := fields.text("reasoning_effort"):
        given = {"reasoning_effort": effort} | given
        if effort == "none":
            given = {"enable_thinking": False} | given
    return ChatPrompt(
        messages=_messages(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        template_variables=given,
    )


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs", False), read_logprobs(fields, "top_logprobs")
    if top and not wanted:
        raise bad_request("top_logprobs is given without logprobs; set logprobs", "top_logprobs")
    return (top or 0) if wanted else None


def _messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return tuple(_message(index, one) for index, one in enumerate(messages))


def _message(index: int, message: Any) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        expected = "an object with a role and a content"
        raise bad_request(f"{where} is {shown(message)}; expected {expected}", where)
    read = dict(message)
    read["role"] = ROLES.get(message["role"], message["role"])
    read["content"] = _content(f"{where}.content", message.get("content"))
    if "reasoning" in message:  # templates read the older name
        read.setdefault("reasoning_content", message["reasoning"])
    return read


def _content(where: str, content: Any) -> str:
    """The text of a message. If it has several parts, their texts are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is {shown(content)}; expected a text or parts of text", where)
    return "\n".join(_part(f"{where}[{index}]", one) for index, one in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    expected = '{"type": "text", "text": ...}, as the model reads text only'
    raise bad_request(f"{where} is {shown(part)}; expected {expected}", where)
