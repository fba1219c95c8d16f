"""The options of the server that are not the engine's."""

import dataclasses
from typing import Literal, get_args

from jaxspec.errors import UsageError

ReasoningParser = Literal["auto", "qwen3", "none"]
WarmUp = Literal["auto", "all", "first", "none"]
METRICS_PREFIX = "vllm:"


@dataclasses.dataclass(frozen=True)
class ServingOptions:
    """How requests are answered over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network that the machine is in."""
    port: int = 8000
    """Port to listen on; 0 for any free one."""
    served_model_name: tuple[str, ...] = ()
    """Names by which requests may call the model, the first in answers; by default that of --model.
    """
    api_key: tuple[str, ...] = ()
    """A key that requests must have as a bearer token; may be repeated. By default that of the
    environment variable JAXSPEC_API_KEY, or none."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of this origin may call the server, * for all; may be repeated (default: none)."""
    max_queued_requests: int = 256
    """Choices of requests that may wait for a slot; further requests are answered with 503."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to end after SIGTERM or SIGINT; 0 ends them at once."""
    default_max_tokens: int | None = None
    """Most tokens of an answer to a chat that does not say; by default the rest of the context."""
    chat_template: str | None = None
    """File of a chat template, in place of that of the model's folder."""
    reasoning_parser: ReasoningParser = "auto"
    """qwen3: thinking between <think> and </think> is sent apart from the answer; auto: if the chat
    template knows these tags."""
    prompt_tokens_details: bool = True
    """Whether usage says how many tokens of the prompt were found in the prefix cache, which tells
    a client what others have asked."""
    keep_alive_interval: float = 15.0
    """Seconds without an event after which a stream gets a comment, so that no proxy closes it."""
    metrics_prefix: str = METRICS_PREFIX
    """What the names of the metrics begin with."""
    warm_up: WarmUp = "auto"
    """Which programs are compiled before the server is ready: all, those of a first request, or
    none; auto: all on an accelerator, those of a first request on a CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port is {self.port}; expected 0 to {2**16 - 1}")
        for name in ("max_queued_requests", "shutdown_timeout"):
            if not 0 <= getattr(self, name) < 2**31:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not 0 < self.keep_alive_interval < 2**31:
            raise UsageError(
                f"keep_alive_interval is {self.keep_alive_interval}; expected more than 0"
            )
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise UsageError(f"default_max_tokens is {self.default_max_tokens}; expected 1 or more")
        for name, kind in (("reasoning_parser", ReasoningParser), ("warm_up", WarmUp)):
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(get_args(kind))
                raise UsageError(f"{name} is {getattr(self, name)!r}; expected one of {expected}")
        for name in ("served_model_name", "api_key"):
            if "" in getattr(self, name):
                raise UsageError(f"{name} is empty; leave it out, or give a text")
