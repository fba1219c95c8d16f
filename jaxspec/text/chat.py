"""Chat messages to prompt text, with the jinja template of the model folder.

A template may come from a hub, so it is untrusted code: it runs in jinja's immutable sandbox and
with a time limit. It gets the same variables as from transformers' `apply_chat_template`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import LoadError, UsageError, one_line
from jaxspec.text.tokenizer_files import read_text_config

RENDER_SECONDS = 10.0


@dataclass(frozen=True)
class ChatTemplate:
    """The compiled chat template of a model folder."""

    program: CodeType
    """Renders a chat without tools."""
    tools_program: CodeType
    """Renders a chat with tools; most models have one template for both."""
    special_tokens: Mapping[str, str]
    """Text of the special tokens by role, which a template may use as variables."""


def open_chat_template(folder: str | Path) -> ChatTemplate:
    config = read_text_config(Path(folder))
    if "default" not in config.chat_templates:
        raise LoadError(
            f"no chat template in {folder}: expected chat_template.jinja or a `chat_template` in "
            "tokenizer_config.json; give a plain prompt with --no-chat-template"
        )
    source = config.chat_templates["default"]
    return ChatTemplate(
        program=_compile(source, folder),
        tools_program=_compile(config.chat_templates.get("tool_use", source), folder),
        special_tokens=config.special_tokens,
    )


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    seconds: float = RENDER_SECONDS,
) -> str:
    """The prompt text. If `enable_thinking` is None, the template's default applies."""
    _check_messages(messages)
    variables = dict(template.special_tokens) | {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    program = template.program if tools is None else template.tools_program
    return _run(program, variables, deadline=time.monotonic() + seconds)


class _MessagesRefused(Exception):
    """The template called `raise_exception`."""


class _TooSlow(Exception):
    """The template was still running at its deadline."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise UsageError("the chat has no messages, expected at least one; give a prompt")
    for index, message in enumerate(messages):
        if "role" not in message:
            raise UsageError(
                f"message {index} has the keys {sorted(message)}, expected `role` and `content`"
            )


def _compile(source: str, folder: str | Path) -> CodeType:
    environment = _environment(deadline=0.0)
    try:
        tree = environment.parse(source)
        for repeated in list(tree.find_all((nodes.For, nodes.Macro))):
            check = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
            statement = nodes.ExprStmt(check).set_lineno(repeated.lineno)
            repeated.body.insert(0, statement.set_environment(environment))
        return environment.compile(tree)
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise LoadError(
            f"the chat template in {folder} is not valid jinja ({one_line(error)}); "
            "download it again or give a plain prompt with --no-chat-template"
        ) from error


def _environment(deadline: float) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.extend(check_clock=lambda: _check_clock(deadline))
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _check_clock(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _TooSlow


def _run(program: CodeType, variables: Mapping[str, Any], deadline: float) -> str:
    environment = _environment(deadline)
    template = jinja2.Template.from_code(environment, program, environment.make_globals(None))
    try:
        return template.render(**variables)
    except _MessagesRefused as error:
        raise UsageError(f"the chat template refuses these messages: {one_line(error)}") from error
    except _TooSlow as error:
        raise LoadError(
            "the chat template ran out of time; check it for endless loops, or give a plain "
            "prompt with --no-chat-template"
        ) from error
    except (SecurityError, OverflowError, RecursionError, MemoryError) as error:
        raise LoadError(
            f"the chat template leaves its sandbox ({one_line(error)}); do not use this template"
        ) from error
    except Exception as error:  # expressions in a template can raise anything
        raise UsageError(
            f"the chat template cannot render these messages "
            f"({type(error).__name__}: {one_line(error)}); check roles, contents and tools"
        ) from error


def _refuse(message: object) -> NoReturn:
    raise _MessagesRefused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escaped HTML: jinja's own filter escapes it, unlike the text that models were
    trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
