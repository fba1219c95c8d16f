"""A drafter in FP8 chooses its drafts with a copy of the head in 8 bits, where that is faster."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fp8_drafter import rounded_by_hand
from test_kernel_choices import HOPPER, traced_choices

from jaxspec.checkpoint.fp8_names import quantised_drafter
from jaxspec.engine.setup import memory
from jaxspec.engine.setup.copied_head import copying_head, say_if_unread
from jaxspec.engine.setup.describe import models_in_words
from jaxspec.engine.setup.opened import Opened
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.layers.shards import Shards
from jaxspec.measure.engines import random_models
from jaxspec.models import copied_head
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.parameters import num_bytes, parameter_shapes
from jaxspec.models.sharding import placed, placements
from jaxspec.proposers.drafters import with_quantised_inputs
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Choice
from pallas_kernels.fp8_product import reference

HIDDEN, VOCABULARY, REDUCED, DRAFTS = 256, 640, 384, 7
AMPERE = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0", core_count=108
)
HEADS = ["tied", "untied", "own", "reduced"]
"""Whose head it is, and how it is stored: the target's embedding or head, the drafter's own, over
all tokens or over some."""


def decoder(layers: int) -> Decoder:
    return Decoder(HIDDEN, 128, layers, 1, 1, 128, 1e-6, Rope(1e4), 64)


def pair_with(which: str, dtype="float32", quantised: bool = True, devices: int = 1) -> Opened:
    """A random target, and a drafter in FP8."""
    draft = DFlashConfig(
        decoder(1),
        block_size=DRAFTS + 1,
        mask_token_id=1,
        target_layer_ids=(0,),
        vocab_size=VOCABULARY,
        block_masks=(BlockMask(causal=False),),
        owns_head=which in ("own", "reduced"),
        draft_vocab_size=REDUCED if which == "reduced" else None,
    )
    draft = quantised_drafter(draft, "the drafter") if quantised else draft
    target = Qwen3Config(decoder(2), VOCABULARY, tie_word_embeddings=which == "tied")
    return random_models(target, draft, dtype, devices=devices)


def head_of(pair: Opened, which: str) -> np.ndarray:
    """The head that the drafter uses, [outputs, inputs]."""
    target, drafter = pair.params["target"], pair.params["drafter"]
    if which == "tied":
        return np.asarray(target["embedding"]["embedding"], np.float32)
    model = target if which == "untied" else drafter
    return np.asarray(model["head"]["kernel"], np.float32).T


def dequantised(copy: dict) -> np.ndarray:
    scales = np.asarray(copy["scales"]).repeat(128, axis=0).repeat(128, axis=1)
    return np.asarray(copy["weight"], np.float32) * scales


def hidden_states(batch: int, places: int, dtype="float32"):
    random = np.random.default_rng(batch)
    return jnp.asarray(random.normal(size=(batch, places, HIDDEN)), dtype)


def logits(pair: Opened, hidden, quantised_inputs: bool = False, params=None):
    """What the drafts at these places are chosen by."""
    [proposer] = pair.models.proposers
    proposer = with_quantised_inputs(proposer) if quantised_inputs else proposer
    return proposer.logits(pair.models.target, params or pair.params, hidden)


@pytest.mark.parametrize("which", HEADS)
@pytest.mark.parametrize("outputs_at_once", [128, 256, 4096])
def test_the_copy_is_the_head_rounded_by_hand(which, outputs_at_once, monkeypatch):
    """Also if the last outputs are fewer than are rounded at once."""
    monkeypatch.setattr(copied_head, "NUMBERS_AT_ONCE", outputs_at_once * HIDDEN)
    pair = pair_with(which)
    copy, head = pair.params["drafter"][copied_head.NAME], head_of(pair, which)
    assert copy["weight"].dtype == jnp.float8_e4m3fn
    assert copy["scales"].shape == tuple(size // 128 for size in head.shape)
    np.testing.assert_allclose(dequantised(copy), rounded_by_hand(head), rtol=1e-6)
    shapes = parameter_shapes(pair.drafter)
    assert shapes[f"{copied_head.NAME}/weight"].shape == copy["weight"].shape


@pytest.mark.parametrize("which", HEADS)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_logits_are_those_of_the_copy(which, dtype, error):
    pair, hidden = pair_with(which, dtype), hidden_states(2, DRAFTS, dtype)
    found = logits(pair, hidden)
    plain = pair_with(which, dtype, quantised=False)
    assert found.dtype == logits(plain, hidden).dtype == jnp.dtype(dtype)
    head = dequantised(pair.params["drafter"][copied_head.NAME])
    wanted = np.asarray(hidden, np.float32) @ head.T
    off = np.asarray(found, np.float32) - wanted
    assert np.linalg.norm(off) < error * np.linalg.norm(wanted)


@pytest.mark.parametrize("which", HEADS)
@pytest.mark.parametrize(
    ("batch", "places", "quantised_inputs", "reads_copy"),
    [
        (1, 7, False, True),
        (128, 1, False, True),
        (129, 1, False, False),
        (19, 7, False, False),
        (1, 7, True, True),
        (19, 7, True, True),
    ],
)
def test_which_head_a_step_reads(which, batch, places, quantised_inputs, reads_copy):
    """The other head is spoilt. More than 128 rows read the copy only in 8 bits."""
    pair, hidden = pair_with(which), hidden_states(batch, places)
    wanted = logits(pair, hidden, quantised_inputs)
    params, drafter = pair.params, pair.params["drafter"]
    copy = drafter[copied_head.NAME]
    spoilt = lambda tree: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), tree)
    no_copy = params | {"drafter": drafter | {copied_head.NAME: spoilt(copy)}}
    no_head = params | {"drafter": spoilt(drafter) | {copied_head.NAME: copy}}
    no_head |= {"target": spoilt(params["target"])}
    read, unread = (no_head, no_copy) if reads_copy else (no_copy, no_head)
    np.testing.assert_array_equal(logits(pair, hidden, quantised_inputs, read), wanted)
    assert jnp.isnan(logits(pair, hidden, quantised_inputs, unread)).any()


def test_a_drafter_in_16_bits_has_no_copy():
    """And traces the same operations as a model that knows of none."""
    pair, hidden = pair_with("tied", quantised=False), hidden_states(1, DRAFTS)
    assert not pair.drafter.config.copies_head and copied_head.NAME not in pair.params["drafter"]
    found = jax.make_jaxpr(lambda params: logits(pair, hidden, params=params))(pair.params)
    assert [equation.primitive.name for equation in found.eqns] == ["dot_general"]


@pytest.mark.parametrize(
    ("device", "dtype", "kernels", "copied"),
    [
        (HOPPER, "bfloat16", "auto", True),
        (HOPPER, "float32", "auto", False),
        (HOPPER, "bfloat16", "xla", False),
        (AMPERE, "bfloat16", "auto", False),
    ],
)
@pytest.mark.parametrize(("batch", "width"), [(1, 8), (8, 8), (1, 512), (1, 1)])
def test_on_a_gpu_only_a_kernel_multiplies_it(
    device, dtype, kernels, copied, batch, width, monkeypatch
):
    pair = pair_with("untied", dtype)
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    proposer = pair.models.proposers[0].with_kernels(kernels)
    config, said = proposer.drafter.config, set(proposer.kernel_choices(batch, width, 16))
    without = proposer.drafter.clone(config=dataclasses.replace(config, copies_head=False))
    others = list(without.kernel_choices(batch, width, 16))
    of_head = list(proposer.drafter.kernel_choices(batch, width, 16))[len(others) :]
    assert of_head == ([("fp8_product", Choice("mosaic"))] if copied and width > 1 else [])
    places = min(width - 1, DRAFTS)
    if places:
        hidden = jnp.zeros((batch, places, HIDDEN), dtype)
        run = lambda: proposer.logits(pair.models.target, pair.params, hidden)
        traced = traced_choices(monkeypatch, run)
        assert traced == set(of_head) <= said


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("auto", []),
        ("xla", ["draft_quantization: no kernel multiplies the copy of the head; it is not read"]),
    ],
)
def test_the_log_says_if_the_copy_is_not_read(kernels, said, monkeypatch, caplog):
    pair = pair_with("untied", "bfloat16")
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    with caplog.at_level(logging.INFO, "jaxspec"):
        caplog.clear()
        say_if_unread(pair.drafter.with_kernels(kernels))
        say_if_unread(pair.drafter.with_kernels(kernels).with_shards(Shards(2)))
    assert caplog.messages == said


def test_no_room_for_xla_s_products_with_it_is_planned():
    """The partial products of 128 rows with a head of 151936 tokens would take 5 GB."""
    pair = pair_with("tied")
    planned = lambda params: memory.temporary_bytes(params, VOCABULARY, 128, 128, draws=False)
    bare = {name: part for name, part in pair.params["drafter"].items() if name != "copied_head"}
    more = planned(pair.params) - planned(pair.params | {"drafter": bare})
    scales = {VOCABULARY // 128, HIDDEN // 128}
    assert 0 <= more <= 2 * 128 * 4 * sum(scales)
    products = reference.bytes_of_products(128, VOCABULARY, HIDDEN // 128)
    assert products > more


@pytest.mark.parametrize("which", HEADS)
def test_a_step_reads_the_copy_instead_of_the_head(which):
    pair, plain = pair_with(which), pair_with(which, quantised=False)
    outputs = REDUCED if which == "reduced" else VOCABULARY
    drafter = pair.params["drafter"]
    copy, layers = drafter[copied_head.NAME], num_bytes(drafter["layers_0"])
    assert num_bytes(copy) == outputs * HIDDEN + 4 * (outputs // 128) * (HIDDEN // 128)
    head = 4 * outputs * HIDDEN
    read = lambda pair: pair.models.proposers[0].bytes_read(pair.params, target_head=head)
    saved = num_bytes(plain.params["drafter"]["layers_0"]) - layers + head - num_bytes(copy)
    assert read(plain) - read(pair) == saved


def test_the_copy_is_no_parameter_of_the_drafter_that_is_counted():
    words = models_in_words((pair := pair_with("tied")).models, pair.params)
    drafter = pair.params["drafter"]
    own = sum(x.size for x in jax.tree.leaves(drafter | {copied_head.NAME: {}}))
    assert words.endswith(f" + DFlash {own / 1e3:.1f}K")


class TestWithoutCopy:
    """The drafter reads the head itself."""

    def test_shards(self):
        """Also if the parameters were opened for one device."""
        pair = pair_with("tied")
        shard = pair.drafter.with_shards(Shards(2))
        assert not shard.config.copies_head and shard.copied_head_product(1) is None
        assert pair.drafter.with_shards(Shards(1)).config.copies_head
        places = placements(pair.drafter.with_shards(Shards(1)), Shards(1))
        without = {path: one for path, one in places.items() if "copied_head" not in path}
        kept = placed(pair.params["drafter"], without)
        assert kept.keys() == pair.params["drafter"].keys() - {copied_head.NAME}

    @pytest.mark.parametrize(
        ("changes", "devices", "device", "reason"),
        [
            ({}, 2, None, "there are 2 devices, expected one"),
            ({"vocab_size": 600}, 1, None, "vocab_size is 600, expected a multiple of 128"),
            ({"draft_vocab_size": 100}, 1, None, "vocab_size is 100, expected a multiple of 128"),
            ({}, 1, AMPERE, "the device is NVIDIA A100 (compute capability 8.0); expected a "),
            ({}, 1, HOPPER, None),
            ({}, 1, None, None),
        ],
    )
    def test_the_log_says_why(self, changes, devices, device, reason, monkeypatch, caplog):
        if device is not None:
            monkeypatch.setattr(dispatch, "default_device", lambda: device)
        config = dataclasses.replace(pair_with("tied").drafter.config, **changes)
        with caplog.at_level(logging.INFO, "jaxspec"):
            caplog.clear()
            assert copying_head(config, devices).copies_head == (reason is None)
        said = [f"draft_quantization leaves the head as it is: {reason}"] if reason else []
        assert [line[: len(said[0])] for line in caplog.messages] == said

    def test_a_drafter_whose_layers_are_not_in_8_bits(self, caplog):
        config = pair_with("tied", quantised=False).drafter.config
        with caplog.at_level(logging.INFO, "jaxspec"):
            assert copying_head(config, 2) == config
        assert not caplog.messages
