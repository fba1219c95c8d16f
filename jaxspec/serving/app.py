"""The ASGI application: the routes and the middleware around them."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from jaxspec.engine.engine import Engine
from jaxspec.serving import routes
from jaxspec.serving.handlers import chat_completions, completions
from jaxspec.serving.middleware import REQUEST_ID, Keys, RequestIds
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.refusals import Refusal
from jaxspec.serving.service import Service


def app_of(service: Service) -> Starlette:
    """The application of a service, which the caller starts and drains."""
    app = _app(service.options)
    app.state.service = service
    return app


def asgi_app(
    open_engine: Callable[[], Engine], name: str, options: ServingOptions | None = None
) -> Starlette:
    """The application for any ASGI server that sends the protocol's lifespan messages. The engine
    is opened when the server starts, on a thread of its own. When the server ends, running requests
    have `shutdown_timeout` seconds to finish."""
    options = options or ServingOptions()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.service = service = Service((name,), options, open_engine)
        service.start()
        await service.ready.wait()
        if service.error is not None:
            raise service.error
        yield
        await service.drain(options.shutdown_timeout)
        await service.over.wait()

    return _app(options, lifespan)


def _app(options: ServingOptions, lifespan: Any = None) -> Starlette:
    around: list[Any] = [Middleware(RequestIds)]
    if options.allowed_origins:
        origins = list(options.allowed_origins)
        around.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID],
            )
        )
    if options.api_key:
        around.append(Middleware(Keys, keys=options.api_key))
    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", routes.health),
            Route("/version", routes.version),
            Route("/load", routes.load),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
        ],
        middleware=around,
        exception_handlers={
            404: routes.not_found,
            405: routes.wrong_method,
            Refusal: routes.refused,
            Exception: routes.broken,
        },
    )
