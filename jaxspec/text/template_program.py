"""The program that renders chat templates, in a process of its own; imports nothing of jaxspec.

`template_process.py` starts it, sends it requests and ends it. A request on standard input is its
length as eight bytes, and then a `marshal` of (source, variables, seconds); without variables the
template is only compiled. A reply on standard output is one byte from `REPLIES`, the length of a
text as eight bytes, and the text in UTF-8.
"""

import json
import marshal
import signal
import sys
from collections import OrderedDict
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

READY, TEXT, NOT_JINJA, REFUSED, UNSAFE, FAILED, TOO_LONG, NO_MEMORY = REPLIES = b"+tjrufom"
LONGEST_ERROR = 300
"""Most characters of an error message, which may contain text from the template."""
COMPILED = 8
"""How many compiled templates are kept."""
GRACE_SECONDS = 1.0
"""How long after the deadline this process ends by itself, if its parent has not ended it."""


class _MessagesRefused(Exception):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def main(memory_bytes: int, longest_text: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    _limit_memory(memory_bytes)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    templates: OrderedDict[str, jinja2.Template] = OrderedDict()
    _send(replies, READY, "")
    while head := requests.read(8):
        status, text = _answer(requests, int.from_bytes(head), templates)
        if len(text) > longest_text:
            status, text = TOO_LONG, ""
        _send(replies, status, text)
        if status == NO_MEMORY:
            return  # what is left of the failed attempt would shrink the limit of the next


def _answer(
    requests: BinaryIO, length: int, templates: "OrderedDict[str, jinja2.Template]"
) -> tuple[int, str]:
    try:
        source, variables, seconds = marshal.loads(requests.read(length))
        _end_at(seconds + GRACE_SECONDS)
        try:
            return _rendered(_template(source, templates), variables)
        finally:
            _end_at(0)
    except MemoryError:
        return NO_MEMORY, ""


def _template(
    source: str, templates: "OrderedDict[str, jinja2.Template]"
) -> jinja2.Template | Exception:
    """The compiled template, or why it cannot be compiled."""
    if source not in templates:
        try:
            templates[source] = _environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            return error
        if len(templates) > COMPILED:
            templates.popitem(last=False)
    return templates[source]


def _rendered(
    template: jinja2.Template | Exception, variables: dict[str, Any] | None
) -> tuple[int, str]:
    if isinstance(template, Exception):
        return NOT_JINJA, _one_line(template)
    if variables is None:
        return TEXT, ""
    try:
        return TEXT, template.render(**variables)
    except MemoryError:
        raise
    except _MessagesRefused as error:
        return REFUSED, _one_line(error)
    except (SecurityError, OverflowError, RecursionError) as error:
        return UNSAFE, _one_line(error)
    except Exception as error:  # expressions in a template can raise anything
        return FAILED, f"{type(error).__name__}: {_one_line(error)}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error)[: 4 * LONGEST_ERROR].split())[:LONGEST_ERROR] or type(error).__name__


def _send(replies: BinaryIO, status: int, text: str) -> None:
    content = text.encode("utf-8", "surrogatepass")
    replies.write(bytes([status]) + len(content).to_bytes(8))
    replies.write(content)
    replies.flush()


def _limit_memory(memory_bytes: int) -> None:
    """Lets allocations beyond the limit fail, on systems that can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):  # no such limit on this system
        pass


def _end_at(seconds: float) -> None:
    """Ends this process after so many seconds, even if its parent is gone; 0 cancels that. A timer
    of the operating system does it, so that code that never returns to Python is ended, too."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
