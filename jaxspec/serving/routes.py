"""The routes that do not generate: about the server, its state, and its tokenizer."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxspec import __version__
from jaxspec.engine.engine import Engine
from jaxspec.engine.stats.prometheus import ServedMetrics, exposition
from jaxspec.serving.bodies import read_object
from jaxspec.serving.chat_request import read_chat_prompt
from jaxspec.serving.fields import Fields
from jaxspec.serving.openapi import DESCRIPTION
from jaxspec.serving.prompts import read_chat, read_prompts
from jaxspec.serving.refusals import Refusal, bad_request, unavailable
from jaxspec.serving.service import Phase, Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWNER = "jaxspec"


def _service(request: Request) -> Service:
    return request.app.state.service


async def health(request: Request) -> Response:
    """200 if requests are answered; 503 while the server starts or shuts down; 500 if the engine
    has ended by itself."""
    service = _service(request)
    if service.phase is not Phase.READY:
        _ = service.engine  # raises the reason
    return Response()


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    return JSONResponse({"server_load": _service(request).unfinished})


async def openapi(request: Request) -> Response:
    return JSONResponse(DESCRIPTION)


async def models(request: Request) -> Response:
    service = _service(request)
    cards = [_card(service, name) for name in service.names]
    return JSONResponse({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    service, name = _service(request), request.path_params["model"]
    service.check_model(name)
    return JSONResponse(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": OWNER,
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


async def metrics(request: Request) -> Response:
    service = _service(request)
    engine = service.stats_engine
    if engine is None:
        raise unavailable(service.phase.value)
    served = ServedMetrics(
        prefix=service.options.metrics_prefix,
        model_name=service.names[0],
        page_size=engine.plan.page_size,
        prefix_caching=engine.plan.prefix_caching,
        ended=dict(service.counts.ended),
        rejections=service.counts.rejections,
    )
    return Response(exposition(engine.stats(), served), media_type=METRICS_TYPE)


async def tokenize(request: Request) -> Response:
    service = _service(request)
    fields = Fields(await read_object(request))
    service.check_model(fields.text("model"))
    if "messages" in fields:
        read = await read_chat(service, read_chat_prompt(fields))
    else:
        if not isinstance(prompt := fields.get("prompt"), str):
            raise fields.wrong("prompt", "a text, or messages")
        special = fields.flag("add_special_tokens", True)
        [read] = await read_prompts(service, [prompt], special, False)
    named = fields.flag("return_token_strs", False)
    return JSONResponse(
        {
            "count": len(read.ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": list(read.ids),
            "token_strs": [service.texts.text(id) for id in read.ids] if named else None,
        }
    )


async def detokenize(request: Request) -> Response:
    service = _service(request)
    fields = Fields(await read_object(request))
    service.check_model(fields.text("model"))
    ids, size = fields.ids("tokens"), service.engine.models.target.vocab_size
    if "tokens" not in fields or any(id >= size for id in ids):
        raise fields.wrong("tokens", f"a list of token ids below {size}")
    tokenizer = _tokenizer(service.engine)
    return JSONResponse({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})


async def tokenizer_info(request: Request) -> Response:
    """What a client must know about the tokenizer to count tokens as the server does."""
    engine = _service(request).engine
    tokenizer = _tokenizer(engine)
    names = {
        role: tokenizer.backend.id_to_token(id) for role, id in tokenizer.special_tokens.items()
    }
    template = None if engine.chat_template is None else engine.chat_template.source
    return JSONResponse(
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | names
    )


def _tokenizer(engine: Engine) -> Any:
    if engine.tokenizer is None:
        raise bad_request("the model has no tokenizer; this server takes and returns token ids")
    return engine.tokenizer


async def reset_prefix_cache(request: Request) -> Response:
    service = _service(request)
    _ = service.engine
    service.thread.call(lambda engine: engine.reset_prefix_cache())
    return Response()


async def not_found(request: Request, error: Exception) -> Response:
    path = request.url.path
    return refused(request, Refusal(404, f"no route {path!r}; GET /openapi.json lists the routes"))


async def wrong_method(request: Request, error: Exception) -> Response:
    refusal = Refusal(405, f"{request.url.path} does not answer {request.method}")
    return refused(request, refusal)


def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return Response(error.body, error.status, dict(error.headers), "application/json")


async def broken(request: Request, error: Exception) -> Response:
    """The answer after a bug in jaxspec; the log has its traceback."""
    refusal = Refusal(500, f"the server failed: {type(error).__name__}")
    return refused(request, refusal)
