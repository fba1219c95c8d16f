"""EAGLE-3 drafters of every kind keep the target's tokens, and the distribution of drawn ones."""

import dataclasses

import jax
import pytest
from exact_distribution import check_distribution
from golden_pair import HOUSE, budget, golden_engine, opened, trajectories

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.io import Models
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import eagle3_for, qwen3
from jaxspec.proposers.eagle3 import Eagle3Proposer

CASES = trajectories("eagle3")
GOLDEN = opened("eagle3")


def changed(**changes) -> Eagle3Config:
    config = dataclasses.replace(GOLDEN.models.proposers[0].drafter.config, num_drafts=2)
    decoder = {k: v for k, v in changes.items() if hasattr(config.decoder, k)}
    rest = {k: v for k, v in changes.items() if k not in decoder}
    decoder = dataclasses.replace(config.decoder, **decoder)
    return dataclasses.replace(config, decoder=decoder, **rest)


WHOLE = {"draft_vocab_size": None, "owns_head": False}
KINDS = {
    "the target's embedding and head": changed(**WHOLE),
    "its embedding is its head": changed(**WHOLE, owns_embedding=True, tie_word_embeddings=True),
    "two layers with normed heads": changed(num_layers=2, head_norms=True, norm_output=True),
    "narrower, with normed features": changed(
        hidden_size=64, owns_embedding=True, fc_norm=True, norm_before_residual=True
    ),
}


def engine_of(config: Eagle3Config, **options) -> Engine:
    drafter = Eagle3(config)
    models = Models(GOLDEN.models.target, (Eagle3Proposer(drafter),))
    own = random_params(drafter, jax.random.key(3))
    params = GOLDEN.params | {"drafter": own}
    return Engine.from_models(models, params, **{**HOUSE, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_random_drafters_of_every_kind_keep_the_tokens(kind):
    """One kind also draws: the one whose drafts are of the target's vocabulary, unlike those of the
    golden drafter, which draws in the next test."""
    engine = engine_of(KINDS[kind], driver="overlapped")
    temperature = 0.8 * (kind == "the target's embedding and head")
    params = [budget(24), budget(24, temperature=temperature, seed=3), budget(24), budget(24)]
    prompts = [case["prompt"] for case in CASES[:4]]
    for _ in range(2):  # the second time behind pages that were found
        outputs = engine.generate(prompts, params)
        for i in (0, 2, 3):
            assert list(outputs[i].token_ids) == CASES[i]["greedy"][:24]
            assert outputs[i].stats.num_draft_tokens > 0
    assert len(outputs[1].token_ids) == 24


def test_speculation_keeps_the_distribution():
    check_distribution(golden_engine("eagle3"), GOLDEN, CASES[5]["prompt"])


def test_bytes_that_a_step_reads():
    """Counted by hand: the layer, the norm and the head for every draft, the features once."""
    proposer, params = GOLDEN.models.proposers[0], GOLDEN.params
    hidden, inner, fused, attended = 128, 320, (4 + 2 * 2) * 32, 4 * 32
    layer = 2 * hidden * fused + attended * hidden + 3 * hidden * inner + 3 * hidden
    each, once = layer + hidden + hidden * 352, 3 * hidden * hidden
    assert proposer.bytes_read(params, target_head=10**9) == 4 * (5 * each + once + 352)
    whole = Eagle3Proposer(Eagle3(KINDS["the target's embedding and head"]))
    own = random_params(whole.drafter, jax.random.key(0))
    assert whole.bytes_read({"drafter": own}, target_head=1000) == 2 * 1000 + 4 * (
        2 * (layer + hidden) + once
    )


def test_the_preset_has_the_published_proportions():
    config = eagle3_for(qwen3("qwen3-8b"))
    assert (config.num_drafts, config.target_layer_ids) == (3, (1, 17, 32))
    assert config.draft_vocab_size == 32000 and not config.decoder.head_norms
    assert config.decoder.num_layers == 1 and config.decoder.hidden_size == 4096
