"""Engines over the small trained Qwen3.5 and its drafter, and their expected outputs."""

import functools
import json
from pathlib import Path

from golden_pair import HOUSE, budget

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened

PAIR = Path(__file__).parents[1] / "data" / "hybrid_pair"
SMALL = HOUSE | {"max_model_len": 160, "prefill_chunk": 16, "prefill_shapes": ((4, 16),)}
WHOLE = 49
"""The least number of tokens that the reference committed."""


@functools.cache
def recorded() -> dict:
    return json.loads((PAIR / "trajectories.json").read_text())


def cases() -> list[dict]:
    return recorded()["trajectories"]


@functools.cache
def opened() -> Opened:
    return open_models(PAIR / "target", PAIR / "draft", dtype="float32")


def hybrid_engine(**options) -> Engine:
    options, pair = {"driver": "overlapped", **SMALL, **options}, opened()
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


def check_case(output: RequestOutput, case: dict, max_tokens: int, lengths: bool = True) -> None:
    assert (output.finish_reason, output.error) == ("length", None)
    assert list(output.token_ids) == case["tokens"][:max_tokens]
    if lengths:
        told = list(output.stats.acceptance_lengths)
        assert told == case["acceptance_lengths"][: len(told)]
        assert sum(told) + 1 >= max_tokens


__all__ = ["WHOLE", "budget", "cases", "check_case", "hybrid_engine", "opened", "recorded"]
