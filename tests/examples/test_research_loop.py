"""The loop in examples/research_loop.py: lossless at zero tolerance, and its features are right."""

import importlib.util
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.engine.setup.load_models import open_models

ROOT = pathlib.Path(__file__).parents[2]
PAIR = ROOT / "tests" / "data" / "goldens" / "a"
TOKENS = 32


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "research_loop", ROOT / "examples" / "research_loop.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def opened():
    return open_models(PAIR / "target", PAIR / "draft", dtype="float32")


@pytest.fixture(scope="module")
def case():
    return json.loads((PAIR / "trajectories.json").read_text())["trajectories"][1]


@pytest.fixture(scope="module")
def generation(script, opened, case):
    rule = script.within(0.0)
    return script.run(opened, case["prompt"], TOKENS, script.look_back_or_drafter, rule)


def test_without_tolerance_tokens_are_those_of_greedy_decoding(generation, case):
    assert generation.tokens == case["greedy"][:TOKENS]
    assert (
        sum(generation.acceptance_lengths) >= TOKENS - 1 > sum(generation.acceptance_lengths[:-1])
    )


def test_features_are_those_of_the_committed_tokens(generation, opened, case):
    tokens = [*case["prompt"], *generation.tokens]
    target, width = opened.models.target, len(tokens)
    one = jnp.ones(1, jnp.int32)
    block = block_after(0 * one, 0 * one, width * one, one[:, None], width=width, page_size=64)
    cache = target.new_cache(1, 2, 64)
    _, features, _ = target.apply(
        {"params": opened.params["target"]}, jnp.array([tokens], jnp.int32), block, cache
    )
    of_reply = np.asarray(features[0, len(case["prompt"]) :])
    count = min(len(of_reply), len(generation.features))
    assert count >= TOKENS - 1
    np.testing.assert_allclose(generation.features[:count], of_reply[:count], atol=2e-4, rtol=2e-3)


def test_a_looser_rule_keeps_no_less(script, opened, case, generation):
    rule = script.within(50.0)
    loose = script.run(opened, case["prompt"], TOKENS, script.look_back_or_drafter, rule)
    assert np.mean(loose.acceptance_lengths) > np.mean(generation.acceptance_lengths)


def test_the_proposer_looks_back(script):
    drafted = np.array([7, 7, 7], np.int32)
    repeats = [1, 2, 3, 4, 5, 1, 2, 3]
    assert script.look_back_or_drafter(repeats, drafted).tolist() == [4, 5, 1]
    assert script.look_back_or_drafter([1, 2, 3, 4], drafted).tolist() == [7, 7, 7]


def test_as_a_command(script, tmp_path, capsys):
    file = tmp_path / "features.npz"
    models = ["--model", str(PAIR / "target"), "--draft-model", str(PAIR / "draft")]
    script.main([*models, "--max-tokens", "8", "--features", str(file)])
    assert "acceptance length" in capsys.readouterr().out
    assert np.load(file)["features"].ndim == 2
