"""Chat messages to prompt text, with the jinja template of the model folder.

A template may come from a hub, so it is untrusted code: it runs in jinja's immutable sandbox, in a
process with limits on its time and memory. It gets the same variables as from transformers'
`apply_chat_template`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.errors import JaxspecError, LoadError, UsageError, shown
from jaxspec.text import template_process as process
from jaxspec.text.template_process import TEMPLATES, Reply
from jaxspec.text.tokenizer_files import read_text_config

RENDER_SECONDS = 10.0
ADVICE = "give a plain prompt with --no-chat-template"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model folder, known to be valid jinja."""

    source: str = field(repr=False)
    """The template for a chat without tools."""
    tools_source: str = field(repr=False)
    """The template for a chat with tools; most models have one template for both."""
    special_tokens: Mapping[str, str]
    """Text of the special tokens by role, which a template may use as variables."""
    folder: str
    """Where it is from, for error messages."""


def open_chat_template(folder: str | Path, seconds: float = RENDER_SECONDS) -> ChatTemplate:
    """Compiles the templates of a folder. That may take at most `seconds`; it is limited because
    compiling computes the constants in a template."""
    config = read_text_config(Path(folder))
    if "default" not in config.chat_templates:
        raise LoadError(
            f"no chat template in {folder}: expected chat_template.jinja or a `chat_template` in "
            f"tokenizer_config.json; {ADVICE}"
        )
    source = config.chat_templates["default"]
    return _checked(
        ChatTemplate(
            source=source,
            tools_source=config.chat_templates.get("tool_use", source),
            special_tokens=config.special_tokens,
            folder=str(folder),
        ),
        seconds,
    )


def chat_template_of(
    source: str, special_tokens: Mapping[str, str], where: str, seconds: float = RENDER_SECONDS
) -> ChatTemplate:
    """Compiles a template that is in no model folder. Error messages say `where` it is from."""
    return _checked(ChatTemplate(source, source, special_tokens, where), seconds)


def _checked(template: ChatTemplate, seconds: float) -> ChatTemplate:
    for one in dict.fromkeys((template.source, template.tools_source)):
        _text(TEMPLATES.ask(one, None, seconds), template.folder, seconds)
    return template


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
    seconds: float = RENDER_SECONDS,
) -> str:
    """The prompt text. If `enable_thinking` is None, the template's default applies. `variables`
    are further variables of the template; they override those that the other arguments set."""
    _check_messages(messages)
    if "messages" in variables:
        raise UsageError("the template's variables hold `messages`; give them as messages only")
    arguments: dict[str, Any] = {
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    if enable_thinking is not None:
        arguments["enable_thinking"] = enable_thinking
    arguments |= variables
    source = template.source if arguments["tools"] is None else template.tools_source
    everything = dict(template.special_tokens) | {
        name: _plain(value, f"the {name}") for name, value in arguments.items()
    }
    everything["messages"] = _plain(messages, "the messages")
    return _text(TEMPLATES.ask(source, everything, seconds), template.folder, seconds)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise UsageError("the chat has no messages, expected at least one; give a prompt")
    for index, message in enumerate(messages):
        if "role" not in message:
            raise UsageError(
                f"message {index} has the keys {sorted(message)}, expected `role` and `content`"
            )


def _plain(value: Any, what: str) -> Any:
    """A copy that consists of Python's own dicts, lists, tuples, texts and numbers only, so that it
    can be sent to another process."""
    try:
        return _plain_copy(value)
    except RecursionError:
        raise UsageError(f"{what} are nested without end; expected JSON-like data") from None
    except TypeError as error:
        raise UsageError(
            f"{what} hold {error}; expected texts, numbers, lists and objects"
        ) from None


def _plain_copy(value: Any) -> Any:
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {_plain_copy(key): _plain_copy(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain_copy(entry) for entry in value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain_copy(entry) for entry in value]
    raise TypeError(f"{shown(value)} of type {type(value).__name__}")


def _text(reply: Reply, folder: str, seconds: float) -> str:
    if reply.status == process.TEXT:
        return reply.text
    raise _refusal(reply, f"the chat template in {folder}", seconds)


def _refusal(reply: Reply, template: str, seconds: float) -> JaxspecError:
    """The error for a reply without a rendered text."""
    why, mib = reply.text, process.MEMORY_BYTES // 2**20
    if reply.expired:
        return LoadError(
            f"{template} ran out of time after {seconds:g} s; check it for endless loops, or "
            f"{ADVICE}"
        )
    match reply.status:
        case process.NOT_JINJA:
            return LoadError(
                f"{template} is not valid jinja ({why}); download it again or {ADVICE}"
            )
        case process.REFUSED:
            return UsageError(f"{template} refuses these messages: {why}")
        case process.FAILED:
            return UsageError(
                f"{template} cannot render these messages ({why}); check roles, contents and tools"
            )
        case process.UNSAFE:
            return LoadError(f"{template} leaves its sandbox ({why}); do not use this template")
        case process.TOO_LONG:
            return LoadError(
                f"{template} makes more than {process.LONGEST_TEXT} characters; shorten the "
                f"messages, or {ADVICE}"
            )
    return LoadError(
        f"{template} needs more than {mib} MiB of memory; shorten the messages, or {ADVICE}"
    )
