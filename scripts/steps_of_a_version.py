"""Times decode steps of the version of the code that it imports; compare_steps runs it twice.

It takes the sizes as JSON and prints a line when its engines are ready. From then on it prints a
line for each line that it reads, such as {"method": "dflash", "slots": 8, "steps": 100}.
"""

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import Engine, SamplingParams
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3

ACCEPTED = 3
TOKENS_PER_STEP = {"plain": 1, "dflash": 1 + ACCEPTED}
SETTLING = 5
"""Steps in which every request decodes before the first timed one."""
PREFILL_BATCH = 4
"""Prompts that an engine reads in one step."""
PAGE_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    model: str
    block_size: int
    slots: int
    """The most requests that decode at once."""
    prompt: int
    """Tokens of every prompt."""
    steps: int
    """The most steps that are timed in one run."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary. The tiny model has few, so that on a CPU the host's share of a
        step can be seen."""
        return 512 if self.model == "tiny" else qwen3(self.model).vocab_size


def main() -> None:
    sizes = Sizes(**json.loads(sys.argv[1]))
    compiling, begin = Compiling(), time.perf_counter()
    engines = build_engines(sizes)
    ready = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": round(time.perf_counter() - begin, 2),
    }
    print(json.dumps(ready | compiling.take()), flush=True)
    gc.freeze()
    for line in sys.stdin:
        run = json.loads(line)
        begin = time.perf_counter()
        ran = run_steps(engines[run["method"]], sizes, **run)
        seconds = round(time.perf_counter() - begin, 2)
        print(json.dumps(vars(ran) | compiling.take() | {"seconds": seconds}), flush=True)


class Compiling:
    """Counts the programs that are compiled, by name."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.names: list[str] = []
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self.compiled)
        jax.monitoring.register_event_listener(self.happened)

    def compiled(self, event: str, duration_secs: float, **more: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds.append(duration_secs)
            self.names.append(str(more.get("fun_name")))

    def happened(self, event: str, **_: Any) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"

    def take(self) -> dict[str, Any]:
        """What was compiled since the last call."""
        taken = {
            "programs": Counter(self.names),
            "compile_s": round(sum(self.seconds), 2),
            "cache_hits": self.cache_hits,
        }
        self.seconds, self.names, self.cache_hits = [], [], 0
        return taken


class Waiting:
    """Counts the seconds in which the host waits for arrays from the device."""

    def __init__(self) -> None:
        self.seconds, self.asarray = 0.0, np.asarray
        self.of_device = type(jnp.zeros(1))

    def __enter__(self) -> "Waiting":
        np.asarray = self.timed
        return self

    def __exit__(self, *_: object) -> None:
        np.asarray = self.asarray

    def timed(self, array: Any, *how: Any, **named: Any) -> Any:
        if type(array) is not self.of_device:
            return self.asarray(array, *how, **named)
        begin = time.perf_counter()
        try:
            return self.asarray(array, *how, **named)
        finally:
            self.seconds += time.perf_counter() - begin


@dataclass
class Ran:
    """Figures of every timed step."""

    step_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def build_engines(sizes: Sizes) -> dict[str, Engine]:
    config = replace(qwen3(sizes.model), vocab_size=sizes.vocab_size)
    draft = dflash_for(config, sizes.block_size)
    if draft.mask_token_id >= sizes.vocab_size:
        draft = replace(draft, mask_token_id=sizes.vocab_size - 1)
    target = Qwen3(config, draft.target_layer_ids, jnp.bfloat16)
    drafter = DFlash(draft, jnp.bfloat16)
    params = {"target": random_params(target, jax.random.key(0))}
    both = params | {"drafter": random_params(drafter, jax.random.key(1))}
    models, alone = models_of(target, drafter), models_of(replace(target, capture=()), None)
    longest = sizes.prompt + budget("dflash", sizes.slots, sizes.steps)
    options: dict[str, Any] = {
        "max_batch": sizes.slots,
        "max_model_len": longest,
        "page_size": PAGE_SIZE,
        "num_pages": sizes.slots * -(-(longest + max(sizes.block_size, 16)) // PAGE_SIZE),
        "driver": "overlapped",
    }
    for name in ("prefix_caching", "compile_ahead"):
        if hasattr(getattr(jaxspec, "EngineOptions", None), name):  # else that version has none
            options[name] = False
    acceptance = (1.0,) * ACCEPTED
    return {
        "plain": Engine.from_models(alone, params, **options),
        "dflash": Engine.from_models(models, both, synthetic_acceptance=acceptance, **options),
    }


def models_of(target: Qwen3, drafter: DFlash | None) -> Any:
    """The models in the form that the version takes."""
    try:
        from jaxspec.engine.step.io import Models
        from jaxspec.proposers.dflash import DFlashProposer
    except ImportError:
        from jaxspec.engine.records import Models  # pyright: ignore  # of the version before

        return Models(target, drafter)
    return Models(target, () if drafter is None else (DFlashProposer(drafter),))


def budget(method: str, slots: int, steps: int) -> int:
    """How many tokens a request needs so that all still decode when the timed steps are done."""
    reading = -(-slots // PREFILL_BATCH)
    return TOKENS_PER_STEP[method] * (reading + SETTLING + steps + 3)


def run_steps(engine: Engine, sizes: Sizes, method: str, slots: int, steps: int) -> Ran:
    """Submits prompts and steps until all have ended."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, sizes.vocab_size, (slots, sizes.prompt)).tolist()
    params = SamplingParams(max_tokens=budget(method, slots, steps), ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    ran = Ran()
    for step_ms, host_us, cpu_us in steps_that_decode(engine, ids):
        if len(ran.step_ms) < steps:
            ran.step_ms.append(step_ms)
            ran.host_us.append(host_us)
            ran.cpu_us.append(cpu_us)
    assert len(ran.step_ms) == steps, f"{len(ran.step_ms)} steps with all requests; {steps} asked"
    return ran


def steps_that_decode(engine: Engine, ids: Sequence[int]) -> Iterator[tuple[float, float, float]]:
    """Runs steps until all requests end, and yields the times of those in which all decode."""
    decoding, ended, settled = set(), set(), 0
    while len(ended) < len(ids):
        with Waiting() as waiting:
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            events = engine.step(ids)
            cpu, seconds = time.thread_time() - begin_cpu, time.perf_counter() - begin
        settled += len(decoding) == len(ids) and not ended
        decoding |= {event.index for event in events}
        for event in events:
            if event.output is not None:
                assert event.output.error is None, event.output.error
                ended.add(event.index)
        if settled > SETTLING and not ended:
            yield 1e3 * seconds, 1e6 * (seconds - waiting.seconds), 1e6 * cpu


if __name__ == "__main__":
    main()
