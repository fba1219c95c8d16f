"""`python -m jaxspec.serve`: an HTTP server with OpenAI's protocol."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxspec import cli
from jaxspec.console.flags import add_flags, filled
from jaxspec.console.models import NamedModels, check_models
from jaxspec.console.parser import Parser
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.errors import LoadError
from jaxspec.proposers.methods import METHODS
from jaxspec.serving.listening import bound_socket
from jaxspec.serving.options import ServingOptions

if TYPE_CHECKING:
    import socket

    from jaxspec.engine.engine import Engine

KEY = "JAXSPEC_API_KEY"
DEMO = "jaxspec-demo"
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
SLOTS = 32


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return cli.run(lambda: _serve(arguments), arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxspec serve",
        usage="%(prog)s [--model MODEL] [--draft-model MODEL] [options]",
        description="Answers HTTP requests in the form of OpenAI's completions and chats with a "
        "Qwen3 or Qwen3.5 model, sped up by a drafter if one is named.",
    )
    cli.add_models(parser.add_argument_group("models"))
    _add_http(parser.add_argument_group("server"))
    _add_requests(parser.add_argument_group("requests"))
    speculation = parser.add_argument_group("speculation")
    add_flags(speculation, EngineOptions, "method", choices=("auto", *METHODS), metavar=None)
    add_flags(speculation, EngineOptions, "adaptive", "draft_sampling", "num_drafts", "max_ngram")
    add_flags(speculation, EngineOptions, "confidence_threshold")
    add_flags(speculation, EngineOptions, "min_ngram", "ngram_match", "ngram_threshold", "width")
    _add_engine(parser.add_argument_group("engine"))
    cli.add_debug(parser.add_argument_group("output"))
    return parser


def _add_http(group: argparse._ArgumentGroup) -> None:
    add_flags(group, ServingOptions, "host", "port")
    repeated = {"action": "append", "default": None, "nargs": None}
    add_flags(group, ServingOptions, "served_model_name", metavar="NAME", **repeated)
    add_flags(group, ServingOptions, "api_key", metavar="KEY", **repeated)
    add_flags(group, ServingOptions, "allowed_origins", metavar="ORIGIN", **repeated)
    add_flags(group, ServingOptions, "max_queued_requests", "shutdown_timeout")
    add_flags(group, ServingOptions, "keep_alive_interval", "metrics_prefix", "warm_up")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add_flags(group, ServingOptions, "default_max_tokens")
    add_flags(group, ServingOptions, "chat_template", metavar="FILE")
    add_flags(group, ServingOptions, "reasoning_parser")
    details = argparse.BooleanOptionalAction
    add_flags(group, ServingOptions, "prompt_tokens_details", action=details)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add_flags(group, EngineOptions, "max_batch", default=SLOTS)
    add_flags(group, EngineOptions, "max_model_len", "page_size", "num_pages", "memory_fraction")
    cached = argparse.BooleanOptionalAction
    add_flags(group, EngineOptions, "prefix_caching", action=cached)
    add_flags(group, EngineOptions, "num_snapshots")
    add_flags(group, EngineOptions, "exact", "driver", "kernels", "fp8_activations")
    add_flags(group, EngineOptions, "tensor_parallel_size", "exchange", "step_timeout")
    add_flags(group, EngineOptions, "prefill_chunk", "prefill_budget", "prefill_beside_decoding")
    add_flags(group, EngineOptions, "seed", help="Seed of the server (default: %(default)s)")
    add_flags(group, EngineOptions, "compile_ahead")
    cli.add_kept_programs(group)


def _serve(arguments: argparse.Namespace) -> None:
    _refuse_missing_packages()
    flags = vars(arguments)
    flags["api_key"] = arguments.api_key or [key for key in [os.environ.get(KEY)] if key]
    options, engine_options = filled(ServingOptions, flags), filled(EngineOptions, flags)
    named = filled(NamedModels, flags)
    check_models(named, (engine_options.method,))

    listening = bound_socket(options.host, options.port)
    address = "{}:{}".format(*listening.getsockname()[:2])

    # Nothing above this imports jax, so that errors in the flags are reported at once.
    from jaxspec.serving.running import run
    from jaxspec.serving.service import Service

    names = options.served_model_name or (named.model or named.draft_model or DEMO,)
    open_engine = partial(_opened, named, engine_options, options, listening, address)
    if not run(lambda: Service(names, options, open_engine), listening):
        sys.stderr.flush()
        os._exit(cli.DONE)  # a thread that compiles cannot be ended otherwise


def _refuse_missing_packages() -> None:
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise LoadError(
            f"the server needs {' and '.join(missing)}; install it with "
            "pip install 'jaxspec-decode[serve]'"
        )


def _opened(
    named: NamedModels,
    engine_options: EngineOptions,
    options: ServingOptions,
    listening: "socket.socket",
    address: str,
) -> "Engine":
    """Opens the engine and makes its programs ready, on the engine's thread. Meanwhile /health
    answers 503."""
    from jaxspec.console.opening import opened_engine, say_what_runs
    from jaxspec.serving.warming import warm, with_template

    chosen = say_what_runs(named, cli.say, devices=engine_options.tensor_parallel_size)
    engine = opened_engine(chosen, engine_options, cli.say)
    with_template(engine, options.chat_template)
    warm(engine, options.warm_up, cli.say)
    if listening.fileno() >= 0:  # a signal while the engine was opened has closed it
        cli.say(f"listening on http://{address}")
    return engine


if __name__ == "__main__":
    sys.exit(main())
