"""Rows and chains of the drafter equal their formula, and rows grown step by step those written
at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxspec.cache.block import block_after
from jaxspec.checkpoint.eagle3_config import eagle3_config_of
from jaxspec.checkpoint.eagle3_names import completed, eagle3_sources, parameters_in
from jaxspec.checkpoint.entries import Entries
from jaxspec.models.config import Qwen3Config
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.device import Committed, DraftInputs
from jaxspec.proposers.eagle3 import Eagle3Proposer, Rows
from jaxspec.sampling import SlotSampling
from oracles import draws
from oracles.eagle3_folders import DECODER, SPECULATORS, tensors
from oracles.eagle3_formula import Formula
from oracles.paging import PAGE_SIZE, held_rows, scattered_pages

POSITIONS, CHAIN = 13, 4
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KINDS = {
    "plain": {},
    **{flag: {flag: True} for flag in FLAGS},
    "head norms": {"head_norms": True},
    "two layers": {"num_hidden_layers": 2},
    "two layers, all": {
        "num_hidden_layers": 2,
        "head_norms": True,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
}

IN_CHAINS = ["plain", "norm_before_fc", "two layers, all"]
"""The kinds whose chains are compared as well. Together they have every flag, layer and norm."""


class Drafting:
    """A drafter with weights drawn by their names, its proposer, and its formula."""

    def __init__(self, kind: dict):
        flags = {flag: kind.get(flag, False) for flag in FLAGS}
        layers, normed = kind.get("num_hidden_layers", 1), kind.get("head_norms", False)
        decoder = DECODER | {"num_hidden_layers": layers, "model_type": "llama"}
        config = SPECULATORS | flags | {"transformer_layer_config": decoder}
        config = {**config, "draft_vocab_size": None}
        stored = tensors(config, head_norms=normed, own_table=True)
        read = eagle3_config_of(Entries(config, "config.json"))
        self.config = completed(read, parameters_in(stored, "here"))
        self.proposer = Eagle3Proposer(Eagle3(self.config))
        self.params = {"drafter": parameters(self.config, stored)}
        wide = {name: tensor.astype(np.float64) for name, tensor in stored.items()}
        heads = decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_dim"]
        theta, eps = decoder["rope_theta"], decoder["rms_norm_eps"]
        self.formula = Formula(wide, *heads, layers, theta, eps, **flags)
        self.tokens = draws.tokens("text", POSITIONS + 1, decoder["vocab_size"])
        self.features = draws.features("features", (POSITIONS, 3 * decoder["hidden_size"]))
        self.table = scattered_pages(1, POSITIONS + CHAIN + 8)
        self.target = target = Qwen3(Qwen3Config(self.config.decoder, decoder["vocab_size"], True))
        self.absorb = jax.jit(
            lambda state, block, tokens, features: self.proposer.absorb(
                self.params, state, Committed(block, tokens, features, target)
            )
        )
        self.propose = jax.jit(
            lambda state, inputs: self.proposer.propose(
                target, self.params, state, DraftInputs(**inputs, page_size=PAGE_SIZE),
                width=CHAIN + 1, drawn=True,
            )
        )  # fmt: skip

    def empty(self):
        """NaN wherever nothing was written."""
        state = self.proposer.new_state(1, self.table.size + 1, PAGE_SIZE, 64)
        spoil = lambda leaf: leaf * np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        return jax.tree.map(spoil, state)

    def absorbed(self, state, begin: int, end: int, width: int):
        """Commits the tokens of [begin, end), with junk behind them."""
        zero, table = jnp.zeros(1, jnp.int32), jnp.asarray(self.table)
        block = block_after(zero, zero + begin, zero + end - begin, table, width, PAGE_SIZE)
        tokens = np.full((1, width), 1, np.int32)
        features = np.full((1, width, self.features.shape[1]), 7.0, np.float32)
        tokens[0, : end - begin] = self.tokens[begin:end]
        features[0, : end - begin] = self.features[begin:end]
        return self.absorb(state, block, tokens, features)

    def inputs(self, length: int) -> dict:
        one, none = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.float32)
        return dict(
            slots=0 * one,
            tokens=self.tokens[length : length + 1],
            lengths=length * one,
            active=one,
            num_drafts=CHAIN * one,
            room=64 * one,
            page_table=self.table,
            sampling=SlotSampling(none, 0 * one, none + 1, none, one.astype(jnp.uint32)),
        )


def parameters(config, stored) -> dict:
    def joined(source):
        parts = np.concatenate([stored[name] for name in source.tensors])
        return jnp.asarray(parts.T if source.transposed else parts)

    sources = eagle3_sources(config, stored)
    return unflatten_dict({path: joined(source) for path, source in sources.items()}, sep="/")


@functools.cache
def drafting(kind: str) -> Drafting:
    return Drafting(KINDS[kind])


def close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_equals_the_formula(kind):
    """All rows at once, without a state: the module alone."""
    one = drafting(kind)
    apply = functools.partial(one.proposer.drafter.apply, {"params": one.params["drafter"]})
    fused = apply(jnp.asarray(one.features[None]), method="fuse")
    close(fused[0], one.formula.fuse(one.features.astype(np.float64)))
    zero, table = jnp.zeros(1, jnp.int32), jnp.asarray(one.table)
    block = block_after(zero, zero, zero + POSITIONS, table, POSITIONS, PAGE_SIZE)
    rows = Rows(block, jnp.asarray(one.tokens[None, 1:]), fused)
    logits, passed_on, _ = one.proposer.row(one.target, one.params, rows, one.empty().cache)
    table = one.formula.weights["embed_tokens.weight"]
    expected = one.formula.rows(table[one.tokens[1:]], one.formula.fuse(one.features))
    close(logits[0], expected[0])
    close(passed_on[0], expected[1])


@pytest.mark.parametrize("kind", IN_CHAINS)
def test_four_steps_of_the_chain_equal_the_formula(kind):
    """After a prompt, and after a step that kept some tokens of a wider block."""
    one = drafting(kind)
    state = one.absorbed(one.empty(), 0, 9, width=10)
    for begin, end in ((9, 12), (12, POSITIONS)):
        state, drafts = one.propose(state, one.inputs(begin))
        expected = one.formula.chain(
            one.features[:begin].astype(np.float64), one.tokens[: begin + 1], CHAIN
        )
        assert drafts.tokens[0].tolist() == [int(logits.argmax()) for logits in expected]
        close(drafts.logits[0], np.stack(expected))
        state = one.absorbed(state, begin, end, width=CHAIN + 1)


@pytest.mark.parametrize("kind", IN_CHAINS)
def test_grown_rows_equal_rows_written_at_once(kind):
    """Rows of a chain leave nothing behind: the cells that a step kept hold true features' rows."""
    one = drafting(kind)
    at_once = one.absorbed(one.empty(), 0, POSITIONS, width=POSITIONS)
    state = one.absorbed(one.empty(), 0, 1, width=5)
    for begin, end in ((1, 2), (2, 2), (2, 6), (6, 7), (7, 12), (12, POSITIONS)):
        state, _ = one.propose(state, one.inputs(begin))
        state = one.absorbed(state, begin, end, width=5)
    for grown, whole in zip(jax.tree.leaves(state.cache), jax.tree.leaves(at_once.cache)):
        rows = held_rows(grown, one.table, 0, POSITIONS - 1)
        np.testing.assert_allclose(
            rows, held_rows(whole, one.table, 0, POSITIONS - 1), atol=2e-5, rtol=0
        )
        assert np.isfinite(rows).all() and np.ptp(rows) > 0.1
    close(state.pending, np.asarray(at_once.pending))
    assert state.awaited.tolist() == at_once.awaited.tolist() == [POSITIONS]


def test_kinds_differ():
    """The oracle's own test: each flag, layer and norm of heads changes the drafts' logits."""
    logits = [
        np.stack(one.formula.chain(one.features.astype(np.float64), one.tokens, 2))
        for one in map(drafting, KINDS)
    ]
    for i, some in enumerate(logits):
        assert all(np.abs(some - other).max() > 0.05 for other in logits[:i]), list(KINDS)[i]


def test_a_slot_s_feature_is_forgotten_when_another_request_begins_behind_found_pages():
    one = drafting("plain")
    state = one.absorbed(one.empty(), 0, 8, width=10)
    begun = one.proposer.recall(state, jnp.int32(0), jnp.zeros(64, jnp.int32), jnp.int32(8))
    went_on, began = (one.absorbed(some, 8, 12, width=10) for some in (state, begun))
    row = lambda chain, at: held_rows(chain.cache.layers[0].keys, one.table, at, at + 1)
    assert np.isfinite(row(went_on, 7)).all()
    assert not np.isfinite(row(began, 7)).any(), "that row lies in a page of others"
    np.testing.assert_allclose(row(began, 8), row(went_on, 8), atol=1e-6)
    np.testing.assert_allclose(row(began, 10), row(went_on, 10), atol=1e-6)
    assert began.awaited.tolist() == [12]
