"""Prompts of requests as token ids, read outside of the event loop."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.errors import JaxspecError, UsageError
from jaxspec.serving.chat_request import ChatPrompt
from jaxspec.serving.completion_request import TextOrIds
from jaxspec.serving.refusals import bad_request, failed
from jaxspec.serving.service import Service

SHRINKS = 3
"""The factor by which a tokenizer may shorten a text before it splits it into tokens, because it
may compose several characters into one."""


@dataclasses.dataclass(frozen=True)
class ReadText:
    """A prompt as token ids, with its text."""

    ids: tuple[int, ...]
    text: str


async def read_prompts(
    service: Service, prompts: Sequence[TextOrIds], add_special_tokens: bool, with_text: bool
) -> list[ReadText]:
    """The prompts of a completion. `with_text` is whether the text of token ids is wanted, too."""
    engine = service.engine
    for prompt in prompts:
        refuse_longer_than_context(engine, [prompt] if isinstance(prompt, str) else [], len(prompt))

    def read() -> list[ReadText]:
        return [_read(engine, prompt, add_special_tokens, with_text) for prompt in prompts]

    return await _apart(service, read)


async def read_chat(service: Service, chat: ChatPrompt) -> ReadText:
    """A chat as the model reads it."""
    engine = service.engine
    if engine.chat_template is None:
        raise bad_request(
            "the model has no chat template, which chats need; use /v1/completions, or start the "
            "server with --chat-template FILE"
        )
    refuse_longer_than_context(engine, [str(one["content"]) for one in chat.messages])

    def read() -> ReadText:
        prompt = engine.chat_prompt(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            chat_template_kwargs=chat.template_variables,
        )
        return ReadText(prompt.ids, prompt.text or "")

    return await _apart(service, read)


def refuse_longer_than_context(engine: Engine, texts: Sequence[str], least_tokens: int = 0) -> None:
    """Refuses texts that are too long whatever their tokens are. Tokenizing megabytes takes
    seconds, which are not worth spending if the number of characters already decides."""
    if texts and engine.tokenizer is not None:
        size = sum(map(len, texts))
        least_tokens = size // (engine.tokenizer.longest_token * SHRINKS)
    if least_tokens > engine.max_model_len:
        raise bad_request(
            f"the prompt has at least {least_tokens} tokens, but the context holds "
            f"{engine.max_model_len}; shorten the prompt"
        )


def with_salt(ids: tuple[int, ...], salt: str | None) -> Any:
    """A prompt in the form that the engine takes."""
    return {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})


def _read(engine: Engine, prompt: TextOrIds, add_special_tokens: bool, with_text: bool) -> ReadText:
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise UsageError("the model has no tokenizer, so prompts must be token ids")
        ids = engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return ReadText(tuple(ids), prompt)
    if not with_text or engine.tokenizer is None:
        return ReadText(prompt, "")
    if max(prompt, default=0) >= engine.models.target.vocab_size:
        return ReadText(prompt, "")  # which the engine refuses
    return ReadText(prompt, engine.tokenizer.decode(prompt, skip_special_tokens=False))


async def _apart[Read](service: Service, read: Callable[[], Read]) -> Read:
    """Runs `read` in one of the threads for prompts. Its errors become refusals."""
    try:
        return await asyncio.get_running_loop().run_in_executor(service.readers, read)
    except UsageError as error:
        raise bad_request(str(error)) from None
    except JaxspecError as error:
        raise failed(str(error)) from None
