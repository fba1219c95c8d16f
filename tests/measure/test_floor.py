"""The least bytes of a step, counted by hand, and the speed of a copy."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.measure import floor
from jaxspec.measure.engines import random_models, without_drafter
from jaxspec.models.config import ConfidenceHead, DFlashConfig, MarkovHead, Qwen3Config

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, FEATURES = 8, 12, 4, 2, 6, 50, 3
TARGET_LAYERS, DRAFT_LAYERS, NUMBER = 5, 2, 2
"""NUMBER: bytes of a number in bfloat16."""

LAYER = (
    HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM  # q, k and v
    + HEADS * HEAD_DIM * HIDDEN  # attention's output
    + HIDDEN * 2 * INNER  # gate and up
    + INNER * HIDDEN  # down
    + 2 * HIDDEN  # norms of the residual stream
    + 2 * HEAD_DIM  # norms of q and k
)
HEAD = HIDDEN * VOCABULARY
TARGET = TARGET_LAYERS * LAYER + HIDDEN + HEAD
DRAFTER = DRAFT_LAYERS * LAYER + HIDDEN + FEATURES * HIDDEN * HIDDEN + HIDDEN
POSITION = 2 * KV_HEADS * HEAD_DIM


def decoder(layers: int) -> Decoder:
    return Decoder(HIDDEN, INNER, layers, HEADS, KV_HEADS, HEAD_DIM, 1e-6, Rope(1e4), 64)


TIED = Qwen3Config(decoder(TARGET_LAYERS), VOCABULARY, tie_word_embeddings=True)
UNTIED = dataclasses.replace(TIED, tie_word_embeddings=False)
DRAFT = DFlashConfig(
    decoder(DRAFT_LAYERS),
    block_size=4,
    mask_token_id=1,
    target_layer_ids=(0, 1, 2),
    vocab_size=VOCABULARY,
    block_masks=(BlockMask(causal=False),) * DRAFT_LAYERS,
)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_step_reads_the_head_twice_and_the_embedding_never(config):
    """Tied or not: the target's head is read to verify, and again for the drafter's logits."""
    opened = random_models(config, DRAFT, jnp.bfloat16)
    least = floor.step_bytes(opened.models, opened.params)
    assert least.verify == NUMBER * TARGET
    assert least.draft == NUMBER * (DRAFTER + HEAD)
    assert least.target_position == NUMBER * TARGET_LAYERS * POSITION
    assert least.draft_position == NUMBER * DRAFT_LAYERS * POSITION


def test_a_drafter_with_a_head_of_its_own_reads_that_instead():
    own = dataclasses.replace(DRAFT, owns_head=True, owns_embedding=True, draft_vocab_size=20)
    opened = random_models(UNTIED, own, jnp.bfloat16)
    least = floor.step_bytes(opened.models, opened.params)
    ids = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(opened.params["drafter"])
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    )
    assert least.draft == NUMBER * (DRAFTER + HIDDEN * 20) + ids


@pytest.mark.parametrize(("candidates", "rows"), [(4, 4), (None, 20), (30, 20)])
def test_a_walk_reads_rows_of_its_codebooks(candidates, rows):
    """Three places of a reduced vocabulary of 20 tokens, and the gate once."""
    rank, places = 5, 3
    gate = (HIDDEN + rank) * rank + rank
    own = dataclasses.replace(
        DRAFT,
        owns_head=True,
        draft_vocab_size=20,
        transition=MarkovHead("gated", rank, candidates),
        confidence=ConfidenceHead(reads_token=True),
    )
    opened = random_models(UNTIED, own, jnp.bfloat16)
    ids = 20 * 4
    read = DRAFTER + HIDDEN * 20 + gate + places * rank * (1 + rows)
    assert floor.step_bytes(opened.models, opened.params).draft == NUMBER * read + ids
    proposer = dataclasses.replace(opened.models.proposers[0], confidence_threshold=0.5)
    models = dataclasses.replace(opened.models, proposers=(proposer,))
    with_confidence = read + HIDDEN + rank + 1
    assert floor.step_bytes(models, opened.params).draft == NUMBER * with_confidence + ids


def test_plain_decoding_has_no_draft_bytes():
    opened = without_drafter(random_models(TIED, DRAFT, jnp.bfloat16))
    least = floor.step_bytes(opened.models, opened.params)
    assert (least.verify, least.draft, least.draft_position) == (NUMBER * TARGET, 0, 0)


def test_every_request_of_a_step_reads_its_context_in_both_caches():
    least = floor.StepBytes(verify=1000, draft=100, target_position=8, draft_position=2)
    assert least.of_step(batch=3, context=20.0) == 1000 + 100 + 3 * 20 * (8 + 2)


def test_a_copy_reads_and_writes_and_the_best_round_counts(monkeypatch):
    timed = []

    def seconds_per_call(call, calls, rounds):
        timed.append(call().nbytes)
        return [0.5, 0.25, 1.0]

    monkeypatch.setattr(floor, "seconds_per_call", seconds_per_call)
    assert floor.copy_bytes_per_second() == 2 * floor.COPY_BYTES["cpu"] / 0.25
    assert timed == [floor.COPY_BYTES["cpu"]]
