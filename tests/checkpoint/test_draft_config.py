"""Reads drafter configs in z-lab's and in speculators' layout, and refuses what is unsupported."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_checkpoints import SPECULATORS, TARGET, ZLAB

from jaxspec.checkpoint.draft_config import draft_config_of, read_draft_config
from jaxspec.checkpoint.entries import Entries
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.decoder import BlockMask
from jaxspec.layers.rope import Rope, Yarn

QWEN3_4B_B16 = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN35_4B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 248077,
        "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 32,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(config, block_size=None, folder=Path("drafter")):
    return draft_config_of(Entries(config, "config.json"), folder, block_size)


def nested(config, **change):
    return config | {"dflash_config": config["dflash_config"] | change}


def decoder(config, **change):
    return config | {"transformer_layer_config": config["transformer_layer_config"] | change}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_qwen3_4b_b16():
    config = read(QWEN3_4B_B16)
    assert config.block_size == 16 and config.num_drafts == 15
    assert config.mask_token_id == 151669 and config.vocab_size == 151936
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.num_target_layers == 36
    assert config.decoder.num_layers == 5 and config.decoder.head_dim == 128
    assert config.decoder.rope == Rope(1e6)
    assert config.block_masks == (BlockMask(causal=False),) * 5
    assert not config.owns_embedding and not config.owns_head
    assert config.draft_vocab_size is None and config.target_path is None


def test_qwen35_4b_slides():
    config = read(QWEN35_4B)
    assert config.block_size == 16 and config.mask_token_id == 248077
    assert config.decoder.rope == Rope(1e7)
    assert config.block_masks == (BlockMask(True, 4096),) * 5 + (BlockMask(False),)


def test_yarn_of_the_drafter_s_own():
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    config = read(QWEN3_4B_B16 | {"rope_scaling": yarn | {"beta_fast": 32.0, "beta_slow": 1.0}})
    assert config.decoder.rope == Rope(1e6, Yarn(64.0, 4096))


def test_keys_may_be_flat_or_nested():
    flat = without(ZLAB, "dflash_config") | ZLAB["dflash_config"]
    assert read(flat) == read(ZLAB)
    moved = nested(without(ZLAB, "block_size", "num_target_layers"), block_size=4)
    moved = nested(moved, num_target_layers=3, layer_ids=[0, 1], target_layer_ids=None)
    assert read(moved) == read(ZLAB)
    numbers = {"transformer_layer_config": ZLAB}
    assert read(numbers | {key: ZLAB[key] for key in ("block_size", "num_target_layers")}
                | {"dflash_config": ZLAB["dflash_config"]}) == read(ZLAB)  # fmt: skip


def test_speculators():
    config = read(SPECULATORS, folder=Path("/models/drafter"))
    assert config.target_layer_ids == (0, 1)
    assert config.mask_token_id == 39 and config.block_size == 4
    assert (config.vocab_size, config.draft_vocab_size) == (40, 7)
    assert config.target_path == "/models/target"
    assert config.block_masks == (BlockMask(False),) * 2


def test_whole_vocabulary_is_no_reduced_one():
    assert read(SPECULATORS | {"draft_vocab_size": 40}).draft_vocab_size is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/models/q", "/models/q"), (None, None)],
)
def test_verifier(name, expected):
    changed = SPECULATORS | {"speculators_config": {"verifier": {"name_or_path": name}}}
    assert read(changed).target_path == expected


def test_verifier_may_be_a_folder_beside(tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    changed = SPECULATORS | {"speculators_config": {"verifier": {"name_or_path": "org/name"}}}
    assert read(changed, folder=tmp_path).target_path == str((tmp_path / "org/name").resolve())


def test_block_size_of_the_user():
    assert read(QWEN3_4B_B16, block_size=8).block_size == 8
    assert read(without(ZLAB, "block_size"), block_size=8).block_size == 8
    with pytest.raises(UsageError, match="block size 1"):
        read_draft_config(Path("unread"), block_size=1)


SLIDES = QWEN35_4B | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 64}
EVERYWHERE = {"use_swa": True, "swa_window_size": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SLIDES, [(True, 64), (False, None)]),
        (SLIDES | {"is_causal": False}, [(False, 64), (False, None)]),
        (SLIDES | {"is_causal": True}, [(True, 64), (True, None)]),
        (nested(SLIDES, causal=False), [(False, 64), (False, None)]),
        (nested(SLIDES, causal=False) | {"is_causal": True}, [(True, 64), (True, None)]),
        (nested(SLIDES, swa_window_size=16), [(True, 16), (False, None)]),
        (nested(ZLAB, **EVERYWHERE), [(False, 32)] * 2),
        (nested(ZLAB, **EVERYWHERE) | {"layer_types": [FULL] * 2}, [(False, 32)] * 2),
        (nested(ZLAB, **EVERYWHERE, causal=True), [(True, 32)] * 2),
        (nested(ZLAB, use_swa=True) | {"sliding_window": 8}, [(False, 8)] * 2),
        (nested(ZLAB, causal=True), [(True, None)] * 2),
    ],
)
def test_zlab_masks(config, expected):
    assert read(config).block_masks == tuple(BlockMask(*mask) for mask in expected)


SPECULATORS_SLIDES = decoder(SPECULATORS, layer_types=[SLIDING, FULL], sliding_window=64)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SPECULATORS_SLIDES, [(True, 64), (False, None)]),
        (SPECULATORS_SLIDES | {"sliding_window_non_causal": True}, [(False, 64), (False, None)]),
        (SPECULATORS_SLIDES | {"is_causal": False}, [(False, 64), (False, None)]),
    ],
)
def test_speculators_masks(config, expected):
    assert read(config).block_masks == tuple(BlockMask(*mask) for mask in expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ZLAB | {"architectures": ["QwenDFlareDraftModel"]}, "DFlare"),
        (ZLAB | {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        (nested(ZLAB, lilicorr_candidate_topk=8), "LiLiCorr"),
        (SPECULATORS | {"speculators_model_type": "xpress"}, "xPress"),
        (SPECULATORS | {"architectures": ["XPressSpeculator"]}, "xPress"),
        (nested(ZLAB, causal_head=True), "JetSpec"),
        (nested(ZLAB, draft_shift=1), "JetSpec"),
        (SPECULATORS | {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"architectures": ["PEagleSpeculator"]}, "P-EAGLE"),
        (nested(ZLAB, projector_type="other"), "projector_type"),
        (ZLAB | {"num_anchors": 512}, "num_anchors"),
        (ZLAB | {"markov_rank": 256, "markov_head_type": "vanilla"}, "markov_rank"),
        (SPECULATORS | {"markov_rank": 256}, "markov_rank"),
        (SPECULATORS | {"sample_from_anchor": 1}, "sample_from_anchor"),
        (SPECULATORS | {"speculators_model_type": "eagle3"}, "eagle3"),
        (nested(ZLAB, projector_type="domino"), "Domino"),
        (nested(ZLAB, gru_hidden_dim=1024), "Domino"),
        (nested(ZLAB, attention_sink_bias=True), "attention_sink_bias"),
        (nested(ZLAB, attention_value_scale=0.612), "attention_value_scale"),
        (nested(ZLAB, use_aux_hidden_state=False), "use_aux_hidden_state"),
        (nested(ZLAB, position_scheme="reset"), "position_scheme"),
        (nested(ZLAB, backbone_rotary_base=5e6), "backbone_rotary_base"),
        (nested(ZLAB, something_new=3), "something_new"),
        (ZLAB | {"attention_bias": True}, "attention_bias"),
        (ZLAB | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (ZLAB | {"output_multiplier": 0.2}, "output_multiplier"),
        (ZLAB | {"layer_types": [FULL]}, "layer_types"),
        (ZLAB | {"layer_types": [FULL, "chunked_attention"]}, "layer_types"),
        (ZLAB | {"layer_types": [FULL, SLIDING]}, "sliding_window"),
        (ZLAB | {"use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        (nested(ZLAB, use_swa=True), "sliding_window"),
        (nested(ZLAB, mask_token_id=None), "mask_token_id"),
        (nested(ZLAB, mask_token_id=-1), "mask_token_id"),
        (ZLAB | {"mask_token_id": 38}, "mask_token_id is 38, but 39"),
        (nested(ZLAB, block_size=8), "block_size is 4, but 8"),
        (ZLAB | {"block_size": 1}, "block_size"),
        (without(ZLAB, "block_size"), "block_size"),
        (nested(ZLAB, target_layer_ids=None), "target_layer_ids"),
        (nested(ZLAB, target_layer_ids=[]), "target_layer_ids"),
        (SPECULATORS | {"mask_token_id": None}, "mask_token_id"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids"),
        (SPECULATORS | {"draft_vocab_size": 41}, "draft_vocab_size"),
        (SPECULATORS | {"target_hidden_size": 32}, "target_hidden_size"),
        (SPECULATORS | {"logit_scale": 0.5}, "logit_scale"),
        (decoder(SPECULATORS, attention_bias=True), "attention_bias"),
        (TARGET, "Qwen3ForCausalLM"),
        ({}, "expected a DFlash drafter"),
    ],
)
def test_refused_by_name(config, named):
    with pytest.raises(LoadError, match=re.escape(named)) as caught:
        read(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        nested(ZLAB, num_anchors=4096, loss_decay_gamma=7, mask_token="<|MASK|>"),
        nested(ZLAB, backbone_rotary_base=1e6, attention_value_scale=1.0, markov_rank=0),
        nested(ZLAB, use_aux_hidden_state=True, position_scheme="incremental", use_swa=False),
    ],
)
def test_what_changes_nothing_is_ignored(config):
    assert read(config) == read(ZLAB)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PLACES = st.sampled_from([
    (base, key)
    for base in (ZLAB, SPECULATORS)
    for key in {*base, "layer_types", "is_causal", "rope_scaling", "sliding_window_non_causal"}
])  # fmt: skip


@given(PLACES, JSON)
@example((ZLAB, "dflash_config"), {"\n": False})
def test_nothing_but_load_errors_comes_of_a_strange_config(place, value):
    base, key = place
    try:
        read(base | {key: value})
    except LoadError as error:
        assert str(error).isprintable()
