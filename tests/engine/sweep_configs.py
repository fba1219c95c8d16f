"""The engines over which the sweep goes, and the requests to them."""

import collections
import dataclasses
from collections.abc import Callable
from functools import partial

from fake_device import OVERFLOWS, WIDTH, fake_engine
from sweeping import Ask, Asks, Injection, Line, Truth, counted, injections, outcomes, run, truth

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams

METHODS = {
    "none": {"method": "none"},
    "dflash": {"method": "dflash"},
    "ngram": {"method": "ngram"},
    "dflash+ngram": {"method": "dflash+ngram"},
    "adaptive": {"method": "dflash", "adaptive": True},
    "shared": {"method": "dflash", "adaptive": True, "shares_tokens": True},
}
DRIVERS = ("lockstep", "overlapped")


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)


def fake_asks(method: str) -> Asks:
    """The requests for an engine on the fake device. With adaptive widths the sampled one has no
    drafts, because which of its tokens are drafts would depend on other requests."""
    on_its_own = method not in ("adaptive", "shared")
    sampled = greedy(7, temperature=0.7, seed=3, speculate=on_its_own)
    return Asks(
        bystander=Ask((5, 6, 7, 5, 3), greedy(12)),
        submitted=Ask((5, 6, 7, 5, 9, 8), greedy(8)),  # its first page is the bystander's
        aborted=Ask((4, 4, 4), greedy(12)),
        left=(Ask((1, 2, 3), greedy(6)), Ask((2,) * 11, greedy(6))),
        generated=(
            Ask((3, 1, 4, 1, 5, 9, 2), SamplingParams(max_tokens=6, stop_token_ids=[7, 11])),
            Ask((8, 2, 8, 1, 8, 2, 8), SamplingParams(max_tokens=0, prompt_logprobs=0)),
            Ask((4, 5, 9, 4, 5, 2), greedy(3, prompt_logprobs=0)),
            Ask((2, 7), sampled),
            Ask((OVERFLOWS, 8, 2, 8), greedy(12)),
            Ask((1,) * 40, greedy(40)),
        ),
        after=Ask((6, 2, 6), greedy(5)),
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """An engine to sweep over."""

    make: Callable[[], Engine]
    asks: Asks
    recovers: bool = False
    """Whether a program fails in the scenario, so that the lines run that recover from it."""

    def truth(self) -> Truth:
        return truth(self.make_healthy(), self.asks)

    def make_healthy(self) -> Engine:
        engine = self.make()
        if self.recovers:
            engine.loop.device.faults = []
        return engine

    def lines(self) -> dict[Line, int]:
        engine = self.make()
        return counted(lambda: run(engine, self.asks, []))

    def outcomes(self, true: Truth, injection: Injection) -> collections.Counter[str]:
        return outcomes(self.make(), self.asks, true, injection, self.recovers)


def fakes() -> dict[str, Config]:
    """An engine on the fake device for each driver and method, and some that recover."""
    configs = {
        f"{driver} {name}": Config(partial(fake_engine, driver, **options), fake_asks(name))
        for driver in DRIVERS
        for name, options in METHODS.items()
    }
    recovering = {
        f"{driver} {name} after a fault": Config(
            partial(_failing, driver, METHODS[name]), fake_asks(name), recovers=True
        )
        for driver, name in (("lockstep", "dflash+ngram"), ("overlapped", "adaptive"))
    }
    saving = {
        "overlapped dflash, saved states": Config(
            partial(fake_engine, num_snapshots=2), fake_asks("dflash")
        ),
        "lockstep dflash+ngram, saved states after a fault": Config(
            partial(_failing, "lockstep", METHODS["dflash+ngram"] | {"num_snapshots": 2}),
            fake_asks("dflash+ngram"),
            recovers=True,
        ),
    }
    # One slot stays free, because otherwise no prompt is read in decode steps.
    roomy = {"beside": WIDTH, "num_slots": 9, "num_pages": 80}
    beside = {
        f"overlapped {name}, prompts beside": Config(
            partial(fake_engine, **METHODS[name], **roomy), fake_asks(name)
        )
        for name in ("dflash", "ngram")
    }
    beside["overlapped dflash, prompts beside, after a fault"] = Config(
        partial(_failing, "overlapped", METHODS["dflash"] | roomy),
        fake_asks("dflash"),
        recovers=True,
    )
    return configs | recovering | saving | beside


def each_line_once(configs: dict[str, Config]) -> dict[str, list[Injection]]:
    """One injection for each line that runs in any configuration. The kind of injection, and the
    configuration in which it is made, change from line to line."""
    chosen: dict[str, list[Injection]] = {name: [] for name in configs}
    by_config, names = {name: config.lines() for name, config in configs.items()}, [*configs]
    every_line = dict.fromkeys(line for lines in by_config.values() for line in lines)
    for number, line in enumerate(every_line):
        turned = names[number % len(names) :] + names[: number % len(names)]
        name = next(name for name in turned if line in by_config[name])
        kinds = list(injections({line: by_config[name][line]}))
        chosen[name].append(kinds[number % len(kinds)])
    return chosen


def _failing(driver: str, options: dict) -> Engine:
    """An engine whose ninth program fails while it runs."""
    engine = fake_engine(driver, **options)
    engine.loop.device.faults = [*[None] * 8, "read"]
    return engine


TEXTS = ("class Stack:", "def parse_args(", "def read_config(", "class Node:", "for i in range(")
"""Prompts after which the demo pair's target is sure of its next ten tokens."""
CLEAR = 0.3
"""Lead of the likeliest token, in nats, from which on bfloat16 chooses it in all shapes."""


def demo_asks(engine: Engine, sampled: bool) -> Asks:
    """Requests that end before a token which rounding could change."""
    assert engine.tokenizer is not None
    prompts = [tuple(engine.tokenizer.encode(t, add_special_tokens=False)) for t in TEXTS]
    outputs = engine.generate([list(prompt) for prompt in prompts], greedy(24, logprobs=2))
    asks = [Ask(p, greedy(_clear_tokens(o.logprobs))) for p, o in zip(prompts, outputs)]
    last = Ask(prompts[1][:2], greedy(6, temperature=0.7, seed=3)) if sampled else asks[1]
    return Asks(
        bystander=max(asks, key=lambda ask: ask.params.max_tokens),
        submitted=asks[1],
        aborted=asks[2],
        left=(asks[3],),
        generated=(asks[4], asks[0], last),
        after=asks[2],
    )


def _clear_tokens(logprobs: tuple[dict[int, float], ...]) -> int:
    """How many tokens come before the first one with a close second; at least 1."""
    best = [sorted(step.values(), reverse=True) for step in logprobs]
    close = [place for place, values in enumerate(best) if values[0] - values[1] < CLEAR]
    return max(min([*close, len(best)]), 1)


def demo_engine(driver: str, method: str, dtype: str) -> Engine:
    """An engine over the demo pair, with few programs so that they compile in seconds."""
    sizes = {"max_batch": 3, "max_model_len": 64, "page_size": 16, "prefill_chunk": 16}
    shapes = {"batch_sizes": (3,), "prefill_shapes": ((3, 16),)}
    pair = jaxspec.demo_pair()
    return jaxspec.Engine.from_pretrained(
        *pair, dtype=dtype, driver=driver, method=method, **sizes, **shapes
    )
