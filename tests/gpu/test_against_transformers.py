"""All kernels together against transformers in float32: no further away than transformers' own
bfloat16, whose distance is recorded beside it."""

import numpy as np
import pytest
from reading import draft, read
from wide_pair import CPU, EVERYWHERE, GPU, Place

from oracles import records, wide_case

MEAN, LARGEST = 1.25, 1.5
"""How much further away than transformers' bfloat16 the log probabilities may be: in the mean, and
the furthest of all. Both round at every layer, but not at the same places."""

UNEVEN = (
    [(64, (64, 50, 33, 7))]
    + [(1, (1, 1, 1, 1))] * 3
    + [(16, (16, 11, 16, 16))] * 2
    + [(16, (0, 16, 16, 16))] * 2
    + [(16, (16,) * 4)] * 2
)
PLANS = {
    "in one block": [(97, (97,) * 4)],
    # 256 tokens with products in parts, then 64 in one kernel; some requests stop short or idle.
    "uneven": UNEVEN,
    # Splits share the context of a single request.
    "alone": [(64, (64,))] + [(16, (16,))] * 2 + [(1, (1,))],
}


def errors(name: str, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far our log probabilities and those of transformers' bfloat16 are from float32."""
    record = records.read("wide", "4b_width").outputs
    ours = wide_case.log_probabilities(logits, record[f"{name}_tokens"])
    right = record[f"{name}_float32"]
    return np.abs(ours - right), np.abs(record[f"{name}_bfloat16"] - right)


def as_close_as_bfloat16(name: str, logits: np.ndarray) -> None:
    ours, bfloat16 = errors(name, logits)
    print(f"{name}: mean {ours.mean():.4f}, largest {ours.max():.4f}; transformers' bfloat16: "
          f"mean {bfloat16.mean():.4f}, largest {bfloat16.max():.4f}")  # fmt: skip
    assert ours.mean() < MEAN * bfloat16.mean()
    assert ours.max() < LARGEST * bfloat16.max()


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
def test_log_probabilities(plan: str):
    tokens = wide_case.prompt()
    logits, features = read(GPU, tokens, PLANS[plan])
    for of_slot in logits:
        as_close_as_bfloat16("target", of_slot)
    for of_slot in draft(GPU, tokens, features):
        as_close_as_bfloat16("drafter", of_slot)


def test_the_recorded_distances_are_small_and_not_zero():
    """What a wrong page or layer changes is many times larger."""
    record = records.read("wide", "4b_width").outputs
    for name in ("target", "drafter"):
        away = np.abs(record[f"{name}_bfloat16"] - record[f"{name}_float32"])
        assert 0.01 < away.mean() < 0.1 and away.max() < 0.3
        shuffled = np.abs(np.roll(record[f"{name}_float32"], 1, 0) - record[f"{name}_float32"])
        assert shuffled.mean() > 5 * away.mean()


@EVERYWHERE
def test_however_a_prompt_is_cut_the_numbers_are_the_same(place: Place):
    tokens = wide_case.prompt()
    whole, features = read(place, tokens, PLANS["in one block"])
    drafts = draft(place, tokens, features)
    for plan in ("uneven", "alone"):
        cut, features_of_cut = read(place, tokens, PLANS[plan])
        assert close(place, cut[0], whole[0])
        for other in cut[1:]:
            assert close(place, other, whole[0])
        assert close(place, draft(place, tokens, features_of_cut)[0], drafts[0])


def close(place: Place, one: np.ndarray, other: np.ndarray) -> bool:
    """In float32 nearly equal; in bfloat16 both are rounded, each as far from the truth as
    bfloat16 goes."""
    if place is CPU:
        return np.allclose(one, other, rtol=1e-3, atol=1e-3)
    record = records.read("wide", "4b_width").outputs
    away = np.abs(record["drafter_bfloat16"] - record["drafter_float32"])
    difference = np.abs(one - other)
    return bool(difference.mean() < 2 * away.mean() and difference.max() < 6 * away.max())
