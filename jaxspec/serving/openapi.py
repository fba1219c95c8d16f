"""A description of the routes in the form of OpenAPI 3.1, served at /openapi.json.

It is meant for tools that make requests and check answers: it names the fields that change an
answer, and leaves out those that are ignored.
"""

from typing import Any

from jaxspec import __version__

TEXT = {"type": "string"}
FLAG = {"type": ["boolean", "null"]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
TEXTS = {"type": "array", "items": TEXT}
COUNT = {"type": "integer", "minimum": 0}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": ["number", "null"], "minimum": least, "maximum": most}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


GENERATION = {
    "model": {"type": ["string", "null"]},
    "n": _integer(1, 128),
    "temperature": _number(0, 100),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": _nullable({"anyOf": [TEXT, TEXTS]}),
    "stop_token_ids": _nullable(IDS),
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "stream": FLAG,
    "stream_options": _nullable(_object("", include_usage=FLAG, continuous_usage_stats=FLAG)),
    "cache_salt": {"type": ["string", "null"], "minLength": 1, "maxLength": 1024},
}
COMPLETION = _object(
    "prompt",
    prompt={"anyOf": [TEXT, TEXTS, IDS, _list(IDS)]},
    max_tokens=_integer(0, 2**31 - 1),
    logprobs=_integer(0, 20),
    echo=FLAG,
    add_special_tokens=FLAG,
    **GENERATION,
)
MESSAGE = _object("role content", role=TEXT, content={"type": ["string", "null"]})
CHAT_PROMPT = {
    "messages": _list(MESSAGE) | {"minItems": 1},
    "add_generation_prompt": FLAG,
    "chat_template_kwargs": _nullable({"type": "object"}),
}
CHAT = _object(
    "messages",
    max_tokens=_integer(1, 2**31 - 1),
    max_completion_tokens=_integer(1, 2**31 - 1),
    logprobs=FLAG,
    top_logprobs=_integer(0, 20),
    include_reasoning=FLAG,
    **CHAT_PROMPT,
    **GENERATION,
)
TOKENIZE = {
    "anyOf": [
        _object("prompt", prompt=TEXT, add_special_tokens=FLAG, return_token_strs=FLAG),
        _object("messages", return_token_strs=FLAG, **CHAT_PROMPT),
    ]
}
DETOKENIZE = _object("tokens", tokens=IDS)

ERROR = _object(
    "error",
    error=_object(
        "message type param code",
        message=TEXT,
        type=TEXT,
        param={"type": ["string", "null"]},
        code={"type": "integer"},
    ),
)
USAGE = _object(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
REASON = {"enum": ["stop", "length", "abort", "error"]}


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    written = _object("index finish_reason", index=COUNT, finish_reason=REASON, **choice)
    return _object(
        "id object created model choices usage",
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=_list(written),
        usage=USAGE,
    )


COMPLETION_ANSWER = _answer("text_completion", text=TEXT)
CHAT_ANSWER = _answer("chat.completion", message=_object("role content", role=TEXT, content=TEXT))
TOKENS = _object("count max_model_len tokens", count=COUNT, max_model_len=COUNT, tokens=IDS)
CARD = _object("id object created owned_by", id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT)


def _answers(content: dict[str, Any] | None, *errors: int) -> dict[str, Any]:
    fine = {"description": "The answer"} | ({} if content is None else {"content": content})
    refused = {"description": "Why not", "content": {"application/json": {"schema": ERROR}}}
    return {"200": fine} | {str(status): refused for status in errors}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _post(body: dict[str, Any], content: dict[str, Any] | None) -> dict[str, Any]:
    asked = {"required": True, "content": _json(body)}
    answers = _answers(content, 400, 401, 404, 413, 415, 500, 503)
    return {"post": {"requestBody": asked, "responses": answers}}


def _get(content: dict[str, Any] | None, *errors: int) -> dict[str, Any]:
    return {"get": {"responses": _answers(content, *errors)}}


STREAM = {"text/event-stream": {}}  # tools disagree on what a schema of a stream means
DESCRIPTION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "jaxspec", "version": __version__},
    "paths": {
        "/v1/completions": _post(COMPLETION, _json(COMPLETION_ANSWER) | STREAM),
        "/v1/chat/completions": _post(CHAT, _json(CHAT_ANSWER) | STREAM),
        "/v1/models": _get(_json(_object("object data", data=_list(CARD))), 401, 503),
        "/tokenize": _post(TOKENIZE, _json(TOKENS)),
        "/detokenize": _post(DETOKENIZE, _json(_object("prompt", prompt=TEXT))),
        "/tokenizer_info": _get(_json({"type": "object"}), 400, 401, 503),
        "/reset_prefix_cache": {"post": {"responses": _answers(None, 401, 503)}},
        "/health": _get(None, 500, 503),
        "/version": _get(_json(_object("version", version=TEXT))),
        "/load": _get(_json(_object("server_load", server_load=COUNT))),
        "/metrics": _get({"text/plain": {"schema": TEXT}}, 503),
    },
}
