"""Chats as prompts: rendered with the template of the model, and converted to token ids."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxspec.engine.requests.prompts import ReadPrompt, token_ids
from jaxspec.errors import UsageError, shown
from jaxspec.text.chat import ChatTemplate, render_chat
from jaxspec.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A message of a chat: {"role": "user", "content": text}."""
Messages = Sequence[Message]
"""The messages of one chat, in their order."""

FORM = '[{"role": "user", "content": text}]'


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How messages become a prompt. The names are those of vLLM and transformers."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    enable_thinking: bool | None = None
    """Whether the model may think before it answers; None for the template's own default."""
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Variables of the template. They override those of the other options."""


def as_chats(messages: Messages | Iterable[Messages]) -> tuple[list[Messages], bool]:
    """The chats as a list, and whether a single one was given, as a list of messages."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise UsageError(
            f"messages are of type {type(messages).__name__}; expected {FORM}, or a list of such "
            "lists; generate() continues plain text"
        )
    listed: list[Any] = list(messages)
    if not listed:
        raise UsageError(f"the chat has no messages; expected {FORM}")
    if isinstance(listed[0], Mapping):
        return [listed], True
    return listed, False


def need_template(template: ChatTemplate | None, tokenizer: Tokenizer | None) -> ChatTemplate:
    """The template that the engine has; raises a UsageError if it has none."""
    if tokenizer is None:
        raise UsageError(
            "the engine has no tokenizer, which a chat needs; put the model's tokenizer.json "
            "beside its weights, or give token ids to generate()"
        )
    if template is None:
        raise UsageError(
            "the model has no chat template; expected one in its chat_template.jinja or "
            "tokenizer_config.json; use generate(), which continues plain text"
        )
    return template


def read_chat(
    messages: Messages,
    template: ChatTemplate,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    options: ChatOptions,
) -> ReadPrompt:
    """The chat as a prompt, or with the reason why it is refused."""
    text = None
    try:
        _check_messages(messages)
        text = render_chat(
            template,
            messages,
            enable_thinking=options.enable_thinking,
            tools=options.tools,
            add_generation_prompt=options.add_generation_prompt,
            variables=options.template_kwargs,
        )
        return ReadPrompt(token_ids(text, tokenizer, vocab_size, add_special_tokens=False), text)
    except UsageError as error:
        return ReadPrompt((), text, str(error))


def _check_messages(messages: Messages) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"a chat is of type {type(messages).__name__}; expected {FORM}")
    if wrong := [one for one in messages if not isinstance(one, Mapping)]:
        raise UsageError(f"a message is {shown(wrong[0])}; expected one as in {FORM}")
