"""FP8 targets on several devices, each with its part of numbers and scales."""

import functools

import numpy as np
import pytest
from golden_pair import GOLDENS, HOUSE, budget, check_golden, golden, trajectories

from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import UsageError

BUDGETS = [48, 5, 29, 1, 40]


@functools.cache
def opened(which: str, devices: int, drafted: bool = True) -> Opened:
    draft = GOLDENS / "fp8-block" / "draft" if drafted else None
    target = GOLDENS / which / "target"
    return open_models(target, draft, dtype="float32", tensor_parallel_size=devices)


def engine_of(pair: Opened, devices: int, **options) -> Engine:
    options = {"driver": "overlapped", "tensor_parallel_size": devices, **HOUSE, **options}
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


@pytest.mark.parametrize("which", ["fp8-block", "fp8-channel"])
def test_tokens_and_acceptance_lengths_of_the_record(which):
    engine = engine_of(opened(which, 2), 2)
    cases = trajectories(which)[: len(BUDGETS)]
    outputs = engine.generate([case["prompt"] for case in cases], list(map(budget, BUDGETS)))
    for output, case, most in zip(outputs, cases, BUDGETS, strict=True):
        check_golden(output, case, most)
    assert "FP8" in repr(engine) and "2 x cpu" in repr(engine)


def test_scales_per_channel_on_four_devices():
    engine = engine_of(opened("fp8-channel", 4, drafted=False), 4, method="none")
    cases = trajectories("fp8-channel")[:2]
    outputs = engine.generate([case["prompt"] for case in cases], budget(24))
    for output, case in zip(outputs, cases, strict=True):
        assert list(output.token_ids) == case["greedy"][:24] and output.error is None


def test_activations_that_have_a_scale_for_a_row_of_which_each_device_has_a_part():
    """What is said begins as the recorded logits do; a rounding error may push an activation over
    the border between two numbers."""
    recorded = golden("fp8-channel")["w8a8"]
    pair = opened("fp8-channel", 4, drafted=False)
    engine = engine_of(pair, 4, method="none", fp8_activations=True)
    outputs = engine.generate(recorded["prompts"][:6], budget(1))
    wanted = [int(np.argmax(logits)) for logits in recorded["last_logits"][:6]]
    said = [output.token_ids[0] for output in outputs]
    assert sum(one == other for one, other in zip(said, wanted, strict=True)) >= 5


def test_a_cut_through_a_block_is_refused():
    with pytest.raises(UsageError) as refusal:
        opened("fp8-block", 4, drafted=False)
    assert str(refusal.value) == (
        "tensor_parallel_size is 4, so each device would get 64 of the target's "
        "num_key_value_heads * head_dim 256; expected a multiple of 128, as FP8 weights in blocks "
        "of 128x128 need it; choose fewer, or weights with a scale per channel"
    )
