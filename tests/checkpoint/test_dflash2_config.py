"""Configs and folders of DFlash2 drafters, in both layouts, and those that are refused."""

import re
from pathlib import Path

import numpy as np
import pytest
from dflash2_shapes import added
from tiny_checkpoints import SPECULATORS, TARGET, ZLAB, target_tensors, write, zlab_tensors

from jaxspec.checkpoint.draft_config import draft_config_of
from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.errors import LoadError
from jaxspec.layers.convolution import Convolutions
from jaxspec.layers.decoder import BlockMask
from jaxspec.models.config import Selector

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}
OF_ZLAB = ZLAB | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": [SLIDING] * 2,
    "sliding_window": 64,
    "use_sliding_window": True,
    "dflash_config": ZLAB["dflash_config"] | SIZES,
}
OF_SPECULATORS = SPECULATORS | SIZES | {
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    "sliding_window_non_causal": True,
    "sample_from_anchor": False,
    "draft_vocab_size": 40,
    "transformer_layer_config": SPECULATORS["transformer_layer_config"]
    | {"layer_types": [SLIDING] * 2, "sliding_window": 64, "use_sliding_window": True},
}  # fmt: skip
LAYOUTS = {"zlab": OF_ZLAB, "speculators": OF_SPECULATORS}


def read(config, block_size=None):
    return draft_config_of(Entries(config, "config.json"), Path("drafter"), block_size)


def nested(config, **change):
    return config | {"dflash_config": config["dflash_config"] | change}


def decoder(config, **change):
    return config | {"transformer_layer_config": config["transformer_layer_config"] | change}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def tensors(**changed) -> dict:
    """Of the tiny drafter; None takes a tensor away."""
    drawn = {
        name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
        for name, shape in added(40, 16, 2, rank=6, taps=2, group=8).items()
    }
    return {
        name: tensor
        for name, tensor in (zlab_tensors() | drawn | changed).items()
        if tensor is not None
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_say_the_same(layout):
    config = read(LAYOUTS[layout])
    assert config.kind == "dflash2"
    assert config.convolutions == Convolutions(taps=2, group_size=8)
    assert config.transition == Selector(rank=6, candidates=16)
    assert config.target_layer_ids == (0, 1) and config.num_drafts == 3
    assert (config.embedding_scale, config.logit_scale, config.logit_cap) == (1, 1, None)
    assert config.draft_vocab_size is None and not config.anchor_first
    assert config.block_masks == (BlockMask(False, 64, layout == "speculators"),) * 2


def test_a_plain_drafter_stays_plain():
    for plain in ZLAB, SPECULATORS, nested(ZLAB, selector_rank=None, conv_group_size=0):
        config = read(plain)
        assert config.kind == "dflash" and config.convolutions is config.transition is None
    slides = decoder(SPECULATORS, layer_types=[SLIDING] * 2, sliding_window=64)
    assert read(slides).block_masks == (BlockMask(True, 64),) * 2


def test_scales_of_the_published_muse_drafter():
    config = read(nested(OF_ZLAB, output_multiplier=0.25, final_logit_softcapping=20.0,
                         input_embedding_scale=2.0))  # fmt: skip
    assert (config.embedding_scale, config.logit_scale, config.logit_cap) == (2.0, 0.25, 20.0)


def test_the_block_size_of_the_user():
    assert read(OF_ZLAB, block_size=3).block_size == 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OF_ZLAB, [(False, 64)] * 2),
        (without(OF_ZLAB, "is_causal"), [(True, 64)] * 2),
        (OF_ZLAB | {"layer_types": [SLIDING, FULL]}, [(False, 64), (False, None)]),
        (OF_SPECULATORS, [(False, 64, True)] * 2),
        (without(OF_SPECULATORS, "sliding_window_non_causal"), [(False, 64, True)] * 2),
        (OF_SPECULATORS | {"sliding_window_non_causal": False}, [(True, 64, True)] * 2),
        (decoder(OF_SPECULATORS, layer_types=[SLIDING, FULL]), [(False, 64, True), (False, None)]),
    ],
)
def test_windows(config, expected):
    assert read(config).block_masks == tuple(BlockMask(*mask) for mask in expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "no conv_kernel_size"),
        (nested(ZLAB, conv_kernel_size=2, conv_group_size=16), "no selector_rank"),
        (nested(ZLAB, selector_rank=256), "no conv_kernel_size"),
        (nested(OF_ZLAB, selector_top_k=None), "selector_top_k is null"),
        (nested(OF_ZLAB, selector_top_k=0), "selector_top_k is 0"),
        (nested(OF_ZLAB, selector_top_k=41), "selector_top_k is 41"),
        (nested(OF_ZLAB, conv_kernel_size=0), "conv_kernel_size is 0"),
        (nested(OF_ZLAB, conv_kernel_size=5), "conv_kernel_size is 5"),
        (nested(OF_ZLAB, conv_group_size=6), "a divisor of hidden_size (16)"),
        (nested(OF_ZLAB, output_multiplier=-1.0), "output_multiplier"),
        (nested(OF_ZLAB, final_logit_softcapping="no"), "final_logit_softcapping"),
        (nested(OF_ZLAB, something_new=3), "something_new"),
        (nested(ZLAB, output_multiplier=0.5), "output_multiplier"),
        (OF_ZLAB | {"output_multiplier": 0.5}, "output_multiplier"),
        (OF_ZLAB | {"sliding_window": None}, "sliding_window"),
        (OF_ZLAB | {"sliding_window": 0}, "sliding_window"),
        (OF_ZLAB | {"layer_types": None}, "layer_types"),
        (OF_ZLAB | {"layer_types": [SLIDING]}, "layer_types"),
        (OF_ZLAB | {"block_size": 1}, "block_size"),
        (nested(OF_ZLAB, mask_token_id=None), "mask_token_id"),
        (nested(OF_ZLAB, target_layer_ids=None), "target_layer_ids"),
        (nested(OF_ZLAB, target_layer_ids=["1"]), "target_layer_ids"),
        (nested(OF_ZLAB, gru_hidden_dim=1024), "Domino"),
        (nested(OF_ZLAB, markov_rank=256), "markov_rank"),
        (
            OF_ZLAB
            | {"architectures": ["Qwen3DSparkModel"], "layer_types": [FULL] * 2, "markov_rank": 8},
            "of DFlash2 and of DSpark",
        ),
        (OF_SPECULATORS | {"speculators_model_type": "dspark"}, "speculators_model_type"),
        (OF_SPECULATORS | {"speculators_model_type": "dflash"}, "speculators_model_type"),
        (OF_SPECULATORS | {"speculators_model_type": "eagle3"}, "speculators_model_type"),
        (OF_SPECULATORS | {"draft_vocab_size": 39}, "draft_vocab_size is 39"),
        (OF_SPECULATORS | {"draft_vocab_size": 41}, "draft_vocab_size is 41"),
        (OF_SPECULATORS | {"sample_from_anchor": True}, "sample_from_anchor"),
        (OF_SPECULATORS | {"aux_hidden_state_layer_ids": [0, 1]}, "aux_hidden_state_layer_ids"),
        (OF_SPECULATORS | {"target_hidden_size": 32}, "target_hidden_size"),
        (OF_SPECULATORS | {"selector_rank": None}, "selector_rank"),
        (OF_SPECULATORS | {"output_multiplier": 0.5}, "output_multiplier"),
        (decoder(OF_SPECULATORS, sliding_window=None), "sliding_window"),
        (OF_SPECULATORS | {"sliding_window_non_causal": 1}, "sliding_window_non_causal"),
    ],
)
def test_refused_by_name(config, named):
    with pytest.raises(LoadError, match=re.escape(named)) as caught:
        read(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_without_embedding_and_head_opens(tmp_path, layout):
    checkpoint = open_drafter(write(tmp_path, LAYOUTS[layout], tensors()))
    assert not checkpoint.config.owns_embedding and not checkpoint.config.owns_head
    params = checkpoint.load(np.float32)
    stored = tensors()
    np.testing.assert_array_equal(
        params["layers_1"]["mlp_convolution"]["base"], stored["layers.1.mlp_conv.base_kernel"]
    )
    np.testing.assert_array_equal(
        params["layers_0"]["attention_convolution"]["projection"]["kernel"],
        stored["layers.0.attention_conv.kernel_projection.weight"].T,
    )
    transition = params["transition"]
    for ours, theirs in ("preceding", "predecessor"), ("following", "successor"):
        expected = stored[f"candidate_selector.{theirs}_codebook"]
        np.testing.assert_array_equal(transition[ours]["embedding"], expected)


WITHOUT_SUFFIX = "candidate_selector.successor_codebook"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layers.1.mlp_conv.base_kernel": None}, "no tensor layers.1.mlp_conv.base_kernel"),
        ({WITHOUT_SUFFIX: None}, f"no tensor {WITHOUT_SUFFIX}"),
        (
            {WITHOUT_SUFFIX: None, f"{WITHOUT_SUFFIX}.weight": np.zeros((40, 6), np.float32)},
            f"no tensor {WITHOUT_SUFFIX}",
        ),
        ({WITHOUT_SUFFIX: np.zeros((40, 5), np.float32)}, "expected [40, 6]"),
        ({"candidate_selector.bias": np.zeros(6, np.float32)}, "candidate_selector.bias"),
        ({"layers.2.mlp_conv.base_kernel": np.zeros((2, 2, 16), np.float32)}, "unknown tensor"),
        ({"layers.0.mlp_conv.base_kernel": np.zeros((2, 3, 16), np.float32)}, "[2, 2, 16]"),
        ({"d2t": np.zeros(40, np.int64)}, "d2t"),
    ],
)
def test_damaged_folders(tmp_path, changed, named):
    with pytest.raises(LoadError, match=re.escape(named)) as caught:
        open_drafter(write(tmp_path, OF_ZLAB, tensors(**changed)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 39}, "vocab_size"),
        ({"num_hidden_layers": 1}, "reach outside"),
        ({"num_hidden_layers": 2}, "include the last layer"),
    ],
)
def test_a_target_that_does_not_fit(tmp_path, change, named):
    drafter = open_drafter(write(tmp_path / "drafter", OF_SPECULATORS, tensors())).config
    config = TARGET | change
    target = open_target(write(tmp_path / "target", config, target_tensors(config))).config
    with pytest.raises(LoadError, match=named):
        check_pair(target, drafter)
