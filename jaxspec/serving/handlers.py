"""The routes that generate: from a body in OpenAI's form to an answer."""

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxspec.serving import reasoning
from jaxspec.serving.answers import Answer
from jaxspec.serving.bodies import read_object
from jaxspec.serving.chat_format import ChatFormat
from jaxspec.serving.chat_request import ChatPrompt, read_chat_request
from jaxspec.serving.completion_format import CompletionFormat
from jaxspec.serving.completion_request import read_completion
from jaxspec.serving.engine_thread import Job
from jaxspec.serving.envelope import Envelope, Identity
from jaxspec.serving.generation import Generation, params_of_choice
from jaxspec.serving.mailbox import Mailbox
from jaxspec.serving.prompts import read_chat, read_prompts, with_salt
from jaxspec.serving.reasoning import ReasoningSplit
from jaxspec.serving.service import Service


async def completions(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    asked = read_completion(await read_object(request))
    service.check_model(asked.generation.model)
    prompts = await read_prompts(service, asked.prompts, asked.add_special_tokens, asked.echo)
    job = _job(
        asked.generation,
        [prompt.ids for prompt in prompts],
        [asked.max_tokens] * len(prompts),
        asked.prompt_logprobs,
    )
    envelope = Envelope(
        _identity(request, "cmpl-", "text_completion"),
        asked.generation,
        sum(len(prompt.ids) for prompt in prompts),
        service.options.prompt_tokens_details,
    )
    return Answer(service, job, CompletionFormat(envelope, asked, prompts, service.texts))


async def chat_completions(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    asked = read_chat_request(await read_object(request))
    service.check_model(asked.generation.model)
    prompt = await read_chat(service, asked.prompt)
    max_tokens = asked.generation.max_tokens or _rest(service, len(prompt.ids))
    job = _job(asked.generation, [prompt.ids], [max_tokens], None)
    envelope = Envelope(
        _identity(request, "chatcmpl-", "chat.completion"),
        asked.generation,
        len(prompt.ids),
        service.options.prompt_tokens_details,
    )
    split = _split(service, asked.prompt, prompt.text)
    format = ChatFormat(envelope, asked, split, service.texts, _closing_token(service))
    return Answer(service, job, format)


def _job(
    generation: Generation,
    prompts: list[tuple[int, ...]],
    max_tokens: list[int],
    prompt_logprobs: int | None,
) -> Job:
    """The job of a request: all choices of the first prompt, then all of the next one."""
    every = [(at, choice) for at in range(len(prompts)) for choice in range(generation.n)]
    return Job(
        prompts=[with_salt(prompts[at], generation.cache_salt) for at, _ in every],
        params=[
            params_of_choice(generation, choice, max_tokens[at], prompt_logprobs)
            for at, choice in every
        ],
        mailbox=Mailbox(),
        streams=generation.stream,
    )


def _rest(service: Service, prompt_tokens: int) -> int:
    """Most tokens of an answer if the request sets no limit. The result is at least 1: if the
    context has no room for even one token, the engine refuses the request with its own message."""
    rest = max(service.engine.most_tokens(prompt_tokens), 1)
    return min(rest, service.options.default_max_tokens or rest)


def _identity(request: Request, prefix: str, kind: str) -> Identity:
    service: Service = request.app.state.service
    id = f"{prefix}{request.state.request_id}"
    return Identity(id, kind, int(time.time()), service.names[0])


def _split(service: Service, chat: ChatPrompt, prompt: str) -> ReasoningSplit:
    """The state in which the split of an answer into thinking and content begins. If the request
    has switched thinking off, nothing is split, even if the answer contains the tags."""
    if not _splits_reasoning(service) or chat.template_variables.get("enable_thinking") is False:
        return reasoning.whole_answer()
    return reasoning.split_after(prompt)


def _splits_reasoning(service: Service) -> bool:
    template = service.engine.chat_template
    known = template is not None and reasoning.CLOSE in template.source
    return {"qwen3": True, "none": False, "auto": known}[service.options.reasoning_parser]


def _closing_token(service: Service) -> int | None:
    tokenizer: Any = service.engine.tokenizer
    return None if tokenizer is None else tokenizer.backend.token_to_id(reasoning.CLOSE)
