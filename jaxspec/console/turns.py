"""The turns of a conversation in the terminal: a line from the user, then the model's answer."""

import dataclasses
import sys
from collections.abc import Callable

from jaxspec.console.clocks import DecodeClock, ProgramTimer
from jaxspec.console.conversation import (
    FULL,
    Conversation,
    Document,
    Line,
    help_lines,
    parsed,
)
from jaxspec.console.opening import warmed_up
from jaxspec.console.report import passes
from jaxspec.console.texts import dim
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import JaxspecError

NO_TEMPLATE = (
    "this model has no chat template, so it is no chat model: it continues the text that you write"
)
FIRST_WORDS = "hello"
"""A stand-in for the first message, for which programs are made ready before it is typed."""


class Talk:
    """A conversation and the engine that answers. Text goes to stdout, the rest to stderr."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        begin: Conversation | Document,
        say: Callable[..., None],
        quiet: bool,
    ):
        assert engine.tokenizer is not None, "an engine from folders has a tokenizer"
        self.engine = engine
        self.params = params
        self.said = begin
        self.say = say
        self.quiet = quiet
        self.goes_on = True
        self.encode = engine.tokenizer.encode
        self.prepared: set[int] = set()
        """The widths for which the programs that read prompts are ready."""

    def greet(self) -> None:
        if isinstance(self.said, Document):
            self.say(NO_TEMPLATE)
        if not self.quiet:
            self.say("/help lists commands, Ctrl-C ends an answer, Ctrl-D the conversation")

    def prepare(self) -> None:
        """Makes the programs of a short first turn ready."""
        self._prepare_for(self.said.asked(FIRST_WORDS).token_ids(self.encode))

    def take(self, line: str) -> None:
        """Carries out a line that the user typed. Errors are printed, and the talk goes on."""
        try:
            self._take(parsed(line))
        except JaxspecError as error:
            self.say(f"error: {error}")
        except KeyboardInterrupt:  # before the first token
            self.say("(stopped)")

    def _take(self, line: Line) -> None:
        match line.kind:
            case "say":
                self._answer(line.text)
            case "help":
                self.say(*help_lines())
            case "reset":
                self.said = self.said.reset()
            case "system":
                self._set_system(line.text)
            case "exit":
                self.goes_on = False
            case "unknown":
                self.say(line.text)

    def _set_system(self, text: str) -> None:
        if isinstance(self.said, Document):
            self.say("a model without a chat template has no system message")
        elif text:
            self.said = self.said.with_system(text)
        else:
            self.say(f"system message: {self.said.system or 'none'}")

    def _answer(self, text: str) -> None:
        """Lets the model answer. An interrupt ends the answer, and its text so far is kept."""
        asked = self.said.asked(text)
        ids = asked.token_ids(self.encode)
        most = self.engine.max_model_len
        room = most - len(ids)
        if room < 1:
            self.say(FULL.format(used=len(ids), most=most))
            return
        self._prepare_for(ids)
        params = dataclasses.replace(self.params, max_tokens=min(self.params.max_tokens, room))
        answer, output = self._streamed(ids, params)
        if output is not None and output.error is not None:
            self.say(f"error: {output.error}")
            return
        self.said = asked.answered(answer)
        if output is not None and params.max_tokens == room == len(output.token_ids):
            self.say(FULL.format(used=most, most=most))

    def _streamed(self, ids: list[int], params: SamplingParams) -> tuple[str, RequestOutput | None]:
        """The text of the answer, and its output; None for the output if it was interrupted."""
        timer, text, output = ProgramTimer(self.engine), "", None
        clock = DecodeClock(lambda: timer.seconds)
        try:
            for event in self.engine.stream([ids], params):
                clock.saw(event)
                text += event.text
                output = event.output
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self.say("(stopped)")
            return text, None
        sys.stdout.write("\n")
        sys.stdout.flush()
        if output is not None and not self.quiet:
            self.say(dim(_statistics(output, clock.tokens_per_s), sys.stderr))
        return text, output

    def _prepare_for(self, ids: list[int]) -> None:
        """Makes programs ready, unless an earlier turn of about this length did."""
        width = self.engine.plan.shapes.width_for(len(ids))
        if width not in self.prepared and len(ids) < self.engine.max_model_len:
            params = dataclasses.replace(self.params, max_tokens=1)
            warmed_up(self.engine, [ids], params, self.say, self.quiet)
            self.prepared.add(width)


def _statistics(output: RequestOutput, tokens_per_s: float | None) -> str:
    count, number = len(output.token_ids), passes(output)
    rate = "" if tokens_per_s is None else f", {tokens_per_s:.0f} tokens/s"
    return f"[{count} tokens{rate}, {count / max(number, 1):.2f} tokens per pass]"
