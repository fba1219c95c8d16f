"""What happens to an engine between its opening and its first request."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.files import read_text
from jaxspec.serving.options import WarmUp
from jaxspec.text.chat import chat_template_of

FIRST_PROMPT = (1, 2, 3, 4)
FIRST_TOKENS = 64
"""Most tokens of a first request. Two steps make fewer, so it does not end by itself."""
GREEDY = SamplingParams(max_tokens=FIRST_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=FIRST_TOKENS, ignore_eos=True, temperature=1.0, seed=0)


def with_template(engine: Engine, file: str | None) -> None:
    """Gives the engine the chat template of a file, if there is one."""
    if file is not None:
        special = {}
        if engine.tokenizer is not None:
            ids = engine.tokenizer.special_tokens.items()
            special = {role: engine.tokenizer.backend.id_to_token(id) or "" for role, id in ids}
        engine.chat_template = chat_template_of(read_text(Path(file)), special, file)


def warm(engine: Engine, how_much: WarmUp, say: Callable[[str], None]) -> None:
    """Makes programs ready, and runs a first request of each kind, so that no client's request
    waits for work that only the first one causes."""
    if how_much == "auto":
        how_much = "first" if jax.default_backend() == "cpu" else "all"
    if how_much == "none":
        return
    for params in (GREEDY, SAMPLED):
        if how_much == "all":
            count = engine.warm_up(params=params)
            kind = "sampling" if params.draws else "the likeliest tokens"
            say(f"programs: {count} ready for {kind}")
        _run_first_steps(engine, params)


def _run_first_steps(engine: Engine, params: SamplingParams) -> None:
    """Runs a request until its second event. Then it is dropped, so that no statistics count it."""
    stream = engine.stream(FIRST_PROMPT, params)
    for _ in range(2):
        next(stream)
    stream.close()
