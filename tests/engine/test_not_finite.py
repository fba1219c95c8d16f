"""Logits that are not finite end their request with an error, and no other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from fake_device import OVERFLOWS, continuation, fake_engine
from golden_pair import HOUSE, budget, golden_engine, noisy_drafter, opened, trajectories

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.choose import _finite
from jaxspec.layers.shards import WHOLE

USED = {token for case in trajectories() for token in (*case["prompt"], *case["greedy"])}
BAD = next(token for token in range(4, 512) if token not in USED)
"""A token that is in no other text; its embedding is NaN in the tests' weights."""


def engine_with(value: float, bad: int = BAD, **options) -> Engine:
    """The golden pair with a head of its own, so that one embedding can be bad without the logits
    of all others."""
    pair = opened()
    table = pair.params["target"]["embedding"]["embedding"]
    config = dataclasses.replace(pair.models.target.config, tie_word_embeddings=False)
    target = dataclasses.replace(pair.models.target, config=config, parent=None)
    weights = pair.params["target"] | {
        "embedding": {"embedding": table.at[bad].set(value)},
        "head": {"kernel": table.T},
    }
    models = dataclasses.replace(pair.models, target=target)
    options = {"driver": "overlapped", **HOUSE, **options}
    return Engine.from_models(models, pair.params | {"target": weights}, **options)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_with_bad_logits_ends_and_the_others_go_on(driver, temperature):
    """Then its pages, whose keys are NaN, go to another request."""
    engine, cases = engine_with(np.nan, driver=driver), trajectories()[1:4]
    params = budget(20, temperature=temperature, seed=4)
    prompts = [cases[0]["prompt"], [5, 6, BAD, 7], cases[1]["prompt"]]
    outputs = engine.generate(prompts, [budget(20), params, budget(20)], errors="return")
    assert outputs[1].finish_reason == "error" and outputs[1].token_ids == ()
    assert outputs[1].error.startswith("the logits for position 4 are not finite")
    assert "\n" not in outputs[1].error
    for output, case in ((outputs[0], cases[0]), (outputs[2], cases[1])):
        assert list(output.token_ids) == case["greedy"][:20] and output.error is None
    for case in trajectories()[1:7]:  # more than there are slots: every page is used again
        assert list(engine.generate(case["prompt"], budget(9)).token_ids) == case["greedy"][:9]


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("method", ["dflash", "none"])
def test_the_tokens_before_bad_logits_are_kept(driver, method):
    """The token that cannot be read comes in the middle of an output, and of a block."""
    case = trajectories()[2]
    said = case["greedy"]
    at = next(i for i in range(5, 40) if said[i] not in (*case["prompt"], *said[:i]))
    engine = engine_with(np.nan, bad=said[at], driver=driver, method=method)
    output = engine.generate(case["prompt"], budget(60), errors="return")
    assert list(output.token_ids) == said[: at + 1]
    position = len(case["prompt"]) + at + 1
    assert output.error.startswith(f"the logits for position {position} are not finite")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_of_nan_changes_no_token(temperature):
    """Its drafts are no draws from a distribution, so no token may depend on them."""
    nan = noisy_drafter(scale=float("nan"))
    case, params = trajectories()[2], budget(20, temperature=temperature, seed=4)
    output = golden_engine(params=nan).generate(case["prompt"], params)
    plain = golden_engine(method="none").generate(case["prompt"], params)
    assert output.token_ids == plain.token_ids and output.error is None


@pytest.mark.parametrize("method", ["none", "dflash", "ngram", "dflash+ngram"])
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_any_method_keeps_the_tokens_before(driver, method):
    engine, prompt = fake_engine(driver, method), [OVERFLOWS, 8, 2, 8]
    others = [[3, 4, 5], [6, 6]]
    outputs = engine.generate([prompt, *others], budget(20), errors="return")
    expected = continuation(prompt, 20, True)
    assert 0 < len(expected) < 20 and list(outputs[0].token_ids) == expected
    assert outputs[0].error.startswith("the logits for position 12 are not finite")
    for output, other in zip(outputs[1:], others):
        assert list(output.token_ids) == continuation(other, 20, True)
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize(
    "logits, finite",
    [
        ([1.0, 2.0, 0.5], True),
        ([1.0, -np.inf, 0.5], True),
        ([np.nan, 2.0, 0.5], False),
        ([1.0, 2.0, np.nan], False),
        ([1.0, np.inf, 0.5], False),
        ([np.inf, np.inf, np.nan], False),
        ([-np.inf, -np.inf, -np.inf], False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_logit_shows_whether_all_are_sound(logits, finite, dtype):
    array = jnp.asarray([[logits]], dtype)
    likeliest, largest = WHOLE.likeliest(array)
    (marked,) = _finite(likeliest, largest)[0].tolist()
    assert marked == (int(likeliest[0, 0]) if finite else -1)
