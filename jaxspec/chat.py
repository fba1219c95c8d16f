"""`python -m jaxspec.chat`: a conversation with a model in the terminal."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec import cli
from jaxspec.console.flags import add_flags, filled
from jaxspec.console.models import NamedModels, check_models
from jaxspec.console.parser import Parser
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import UsageError
from jaxspec.proposers.methods import METHODS

if TYPE_CHECKING:
    from jaxspec.console.turns import Talk
    from jaxspec.engine.engine import Engine

LONGEST_ANSWER, LONGEST_CONTINUATION = 1024, 128
"""Default limits on the tokens of a turn: for an answer, and for a continuation, which is what a
model without a chat template gives."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _chat(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec chat",
        usage="%(prog)s [--model MODEL] [--draft-model MODEL] [options]",
        description="A conversation with a Qwen3 or Qwen3.5 model, sped up by a drafter if one is "
        "named. /help lists what can be typed besides messages. A model without a chat template, "
        "such as the demo pair, continues what you write.",
    )
    cli.add_models(parser.add_argument_group("models"))
    _add_turns(parser.add_argument_group("conversation"))
    speculation = parser.add_argument_group("speculation")
    add_flags(speculation, EngineOptions, "method", choices=("auto", *METHODS), metavar=None)
    add_flags(speculation, EngineOptions, "adaptive", "draft_sampling", "num_drafts")
    add_flags(speculation, EngineOptions, "confidence_threshold")
    engine = parser.add_argument_group("engine")
    add_flags(engine, EngineOptions, "max_model_len", "page_size", "memory_fraction")
    add_flags(engine, EngineOptions, "prefix_caching", "driver", "kernels", "fp8_activations")
    add_flags(engine, EngineOptions, "tensor_parallel_size", "exchange", "compile_ahead")
    cli.add_kept_programs(engine)
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_turns(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system-prompt", metavar="TEXT", help="System message (default: none)")
    group.add_argument(
        "--enable-thinking",
        action="store_true",
        help="Let the chat template open a thinking block; drafters are trained without one",
    )
    longest = (
        f"Most tokens of an answer (default: {LONGEST_ANSWER}; {LONGEST_CONTINUATION} for a model "
        "without a chat template)"
    )
    add_flags(group, SamplingParams, "max_tokens", default=None, help=longest)
    add_flags(group, SamplingParams, "temperature", also="--temp")
    add_flags(group, SamplingParams, "top_p", "top_k", "min_p")
    add_flags(group, EngineOptions, "seed")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quiet", "-q", action="store_true", help="Print no progress and no statistics"
    )
    cli.add_debug(group)


def _chat(arguments: argparse.Namespace) -> None:
    flags = vars(arguments)
    params = filled(SamplingParams, {name: flags[name] for name in flags if name != "seed"})
    options = dataclasses.replace(filled(EngineOptions, flags), max_batch=1)
    named = filled(NamedModels, flags)
    check_models(named, (options.method,))

    # Nothing above this imports jax, so that errors in the flags are reported at once.
    from jaxspec.console.opening import opened_engine, say_what_runs

    devices = options.tensor_parallel_size
    chosen = say_what_runs(named, cli.say, arguments.quiet, devices)
    engine = opened_engine(chosen, options, cli.say, arguments.quiet)
    talk = _talk(arguments, engine, params)
    talk.prepare()
    _converse(talk)
    if engine.is_compiling_ahead:
        cli.say("waits for a program that is being compiled; the next start will load it")
    engine.close()


def _talk(arguments: argparse.Namespace, engine: "Engine", params: SamplingParams) -> "Talk":
    from jaxspec.console.conversation import Conversation, Document
    from jaxspec.console.turns import Talk

    template = engine.chat_template
    if template is None and (arguments.system_prompt or arguments.enable_thinking):
        flag = "--system-prompt" if arguments.system_prompt else "--enable-thinking"
        raise UsageError(f"{flag} needs a chat template, which the model lacks; leave it out")
    if arguments.max_tokens is None:
        longest = LONGEST_CONTINUATION if template is None else LONGEST_ANSWER
        params = dataclasses.replace(params, max_tokens=longest)
    begin = Document()
    if template is not None:
        begin = Conversation(template, arguments.system_prompt, arguments.enable_thinking)
    return Talk(engine, params, begin, cli.say, arguments.quiet)


def _converse(talk: "Talk") -> None:
    """Takes turns until the user ends it: by Ctrl-D, Ctrl-C at the prompt, or /exit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and remembers them

    talk.greet()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while talk.goes_on:
            talk.take(_line_of_user(talk))
    if sys.stdin is not None and sys.stdin.isatty():
        cli.say("")


def _line_of_user(talk: "Talk") -> str:
    """A line, or several if they end with a backslash."""
    line = _read("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{_read('. ')}"
    return line


def _read(prompt: str) -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed; expected lines to answer")
    if sys.stdin.isatty():
        return input(prompt)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
