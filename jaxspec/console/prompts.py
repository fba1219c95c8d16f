"""Prompts from flags, files and standard input, as the token ids that the engine takes."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from jaxspec.errors import LoadError, UsageError, one_line, shown
from jaxspec.files import lines_of, text_of
from jaxspec.text.chat import ChatTemplate, render_chat


@dataclasses.dataclass(frozen=True)
class PromptSources:
    """Where a command's prompts come from: first the texts, then the file, then the ids."""

    texts: tuple[str, ...] = ()
    """Texts from the command line; `-` is all of standard input."""
    file: str | None = None
    """A file with lines of text, or of JSON with a "prompt" (text or token ids); `-` is standard
    input."""
    ids: tuple[str, ...] = ()
    """Token ids, separated by commas or spaces."""


Prompt = str | list[int]


def read_prompts(sources: PromptSources, stdin: TextIO | None) -> list[Prompt]:
    """All prompts; at least one. `stdin` is None if the process has no standard input."""
    texts = [_read_text(stdin) if text == "-" else text for text in sources.texts]
    prompts: list[Prompt] = [*texts]
    if sources.file is not None:
        prompts += _read_lines(sources.file, stdin)
    prompts += [_ids(text) for text in sources.ids]
    if not prompts:
        raise UsageError("no prompt; give --prompt, --prompt-file or --prompt-ids")
    if not all(prompts):
        raise UsageError("the prompt is empty; expected some text, or some token ids")
    return prompts


def _read_text(stdin: TextIO | None) -> str:
    try:
        return _opened(stdin).read()
    except (OSError, ValueError) as error:  # a ValueError if it is closed or is not text
        raise _unreadable("standard input", error) from error


def _read_lines(file: str, stdin: TextIO | None) -> list[Prompt]:
    try:
        content = _opened(stdin).buffer.read() if file == "-" else Path(file).read_bytes()
        text = text_of(content)
    except (OSError, ValueError) as error:
        raise _unreadable(f"prompt file {file}", error) from error
    lines = [(number, line) for number, line in enumerate(lines_of(text), 1) if line.strip()]
    is_json = file.endswith((".jsonl", ".json")) or all(line[0] == "{" for _, line in lines)
    if not lines:
        raise UsageError(f"prompt file {file} is empty; expected a prompt per line")
    return [_json_prompt(file, number, line) if is_json else line for number, line in lines]


def _opened(stdin: TextIO | None) -> TextIO:
    if stdin is None:
        raise LoadError("standard input is closed; give the prompt as --prompt TEXT or in a file")
    return stdin


def _unreadable(what: str, error: Exception) -> LoadError:
    return LoadError(f"{what} cannot be read: {one_line(error)}; expected text in UTF-8")


def _json_prompt(file: str, number: int, line: str) -> Prompt:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f'{file}, line {number}: expected a JSON object with a "prompt"; found {shown(line)}'
        ) from error
    if isinstance(prompt, str) or _is_ids(prompt):
        return prompt
    raise UsageError(f'{file}, line {number}: "prompt" is neither text nor a list of token ids')


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(
            f"--prompt-ids {shown(text)}: expected integers separated by commas"
        ) from error


Render = Callable[[str], str]
"""A function from a prompt to the text that the model reads."""


def chat_of(
    template: ChatTemplate | None, system: str | None = None, enable_thinking: bool = False
) -> Render | None:
    """The function that renders a prompt as a chat; None if there is no template. Without one, a
    system prompt and thinking are refused."""
    if template is None:
        if system or enable_thinking:
            flag = "--system-prompt" if system else "--enable-thinking"
            raise UsageError(f"{flag} needs a chat template, which the model lacks; leave it out")
        return None
    before = [{"role": "system", "content": system}] if system else []

    def render(prompt: str) -> str:
        messages = [*before, {"role": "user", "content": prompt}]
        return render_chat(template, messages, enable_thinking=enable_thinking)

    return render


def encoded(
    prompts: Sequence[Prompt], render: Render | None, encode: Callable[..., list[int]]
) -> list[list[int]]:
    """Token ids of every prompt; texts go through the chat template first, if there is one."""

    def one(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise UsageError("the prompt is empty; expected some text")
        if render is None:
            return encode(prompt, add_special_tokens=True)
        return encode(render(prompt), add_special_tokens=False)

    return [one(prompt) for prompt in prompts]
