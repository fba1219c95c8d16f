"""A conversation: its messages, and the token ids that the model reads."""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

from jaxspec.console.parser import did_you_mean
from jaxspec.text.chat import ChatTemplate, render_chat

Encode = Callable[..., list[int]]
COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget what was said, and begin a new conversation",
    "/system": "show the system message; with a text behind it, set it and begin anew",
    "/exit": "end, as Ctrl-D does",
}
ALSO = {"/quit": "/exit", "/clear": "/reset", "/?": "/help"}
FULL = "the context is full: {used} of {most} tokens; /reset begins a new conversation"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat with a model that has a chat template. Every change returns a new record."""

    template: ChatTemplate
    system: str | None = None
    enable_thinking: bool = False
    messages: tuple[dict[str, str], ...] = ()
    """What the user and the model said, in turns."""

    def asked(self, text: str) -> "Conversation":
        return self._with("user", text)

    def answered(self, text: str) -> "Conversation":
        return self._with("assistant", text)

    def reset(self) -> "Conversation":
        return dataclasses.replace(self, messages=())

    def with_system(self, text: str) -> "Conversation":
        return dataclasses.replace(self, system=text, messages=())

    def token_ids(self, encode: Encode) -> list[int]:
        """The token ids that the model reads before it answers."""
        first = ({"role": "system", "content": self.system},) if self.system else ()
        text = render_chat(
            self.template, [*first, *self.messages], enable_thinking=self.enable_thinking
        )
        return encode(text, add_special_tokens=False)

    def _with(self, role: str, text: str) -> "Conversation":
        message = {"role": role, "content": text}
        return dataclasses.replace(self, messages=(*self.messages, message))


@dataclasses.dataclass(frozen=True)
class Document:
    """A text that a model without a chat template continues, in turns with the user."""

    text: str = ""

    def asked(self, text: str) -> "Document":
        """The document with what the user wrote added, on a new line."""
        between = "" if not self.text or self.text.endswith("\n") else "\n"
        return Document(f"{self.text}{between}{text}")

    def answered(self, text: str) -> "Document":
        return Document(self.text + text)

    def reset(self) -> "Document":
        return Document()

    def token_ids(self, encode: Encode) -> list[int]:
        return encode(self.text, add_special_tokens=True)


@dataclasses.dataclass(frozen=True)
class Line:
    """The meaning of a line that the user typed."""

    kind: Literal["say", "help", "reset", "system", "exit", "unknown", "nothing"]
    text: str = ""
    """The message, the new system message, or the answer to an unknown command."""


def parsed(line: str) -> Line:
    """Reads a line. It is a command if its first word is a slash and letters, and otherwise a
    message, so that a message may begin with a path such as /etc/hosts."""
    if not line.strip():
        return Line("nothing")
    word, _, rest = line.strip().partition(" ")
    if not re.fullmatch(r"/([a-z]+|\?)", word):
        return Line("say", line)
    match ALSO.get(word, word):
        case "/help":
            return Line("help")
        case "/reset":
            return Line("reset")
        case "/system":
            return Line("system", rest.strip())
        case "/exit":
            return Line("exit")
    return Line("unknown", f"no command {word}{did_you_mean(word, COMMANDS)}; /help lists all")


def help_lines() -> list[str]:
    commands = [f"  {name:<10}{what}" for name, what in COMMANDS.items()]
    return [
        *commands,
        "Ctrl-C ends an answer, and the program where you write. A backslash at the end of a line "
        "goes on in the next.",
    ]
