"""How fast plain decoding is on the same prompts, measured and not estimated."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxspec.console.clocks import DecodeClock, ProgramTimer
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from jaxspec.models.targets import without_features

MOST_TOKENS, MOST_SECONDS, FEWEST_TOKENS = 32, 5.0, 8
"""Plain decoding is measured for MOST_TOKENS per prompt, or until MOST_SECONDS have passed and
FEWEST_TOKENS have come."""


def plain_engine(engine: Engine, longest_prompt: int, tokens: int) -> Engine:
    """An engine for the target alone: it computes no features and has no drafter. Its caches have
    room for requests of this length."""
    target = without_features(engine.models.target)
    plan = engine.plan
    options = dataclasses.replace(
        engine.options,
        method="none",
        num_pages=_pages(engine, longest_prompt + tokens),
        driver=plan.driver,
        exact=False,
        width=None,
        prefix_caching=False,
        # These would have no effect, and the log would warn of it.
        adaptive=False,
        num_snapshots=None,
        memory_fraction=EngineOptions.memory_fraction,
    )
    params = {"target": engine.params["target"]}
    return Engine.from_models(Models(target), params, engine.tokenizer, options)


def _pages(engine: Engine, positions: int) -> int:
    """The number of pages for as many such requests as run at once, rounded up to a power of two so
    that prompts of other lengths use the same programs."""
    plan = engine.plan
    needed = plan.num_slots * -(-(positions + plan.block_size) // plan.page_size)
    return max(plan.max_pages, min(engine.total_pages, 1 << (needed - 1).bit_length()))


def plain_decoding(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    progress: Callable[[int, int], None],
) -> DecodeClock:
    """Decodes the beginnings of the same outputs without drafts. The rate leaves out the time in
    which programs are made ready."""
    limited = dataclasses.replace(
        params, max_tokens=min(params.max_tokens, MOST_TOKENS), logprobs=None
    )
    plain = plain_engine(engine, max(map(len, prompts)), limited.max_tokens)
    plain.warm_up(prompts, limited)
    timer = ProgramTimer(plain)
    clock = DecodeClock(lambda: timer.seconds)
    most, begin = len(prompts) * (limited.max_tokens - 1), time.perf_counter()
    stream = plain.stream(prompts, limited)
    for event in stream:
        clock.saw(event)
        progress(clock.tokens, most)
        seconds = time.perf_counter() - begin - timer.seconds
        if seconds > MOST_SECONDS and clock.tokens >= FEWEST_TOKENS:
            break
    stream.close()
    return clock
