"""Reads the configs of a Qwen3 target in every published layout."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import TARGET

from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.target_config import read_target_config, target_config_of
from jaxspec.errors import LoadError
from jaxspec.layers.rope import Rope, Yarn

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def read(config):
    return target_config_of(Entries(config, "config.json"))


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_qwen3_8b():
    config = read(QWEN3_8B)
    decoder = config.decoder
    assert (decoder.hidden_size, decoder.intermediate_size) == (4096, 12288)
    assert (decoder.num_layers, decoder.num_heads, decoder.num_kv_heads) == (36, 32, 8)
    assert (decoder.head_dim, decoder.rms_norm_eps) == (128, 1e-6)
    assert decoder.rope == Rope(1e6) and decoder.max_position_embeddings == 40960
    assert config.vocab_size == 151936 and not config.tie_word_embeddings
    assert config.eos_token_ids == (151645,)


def test_rope_parameters_say_the_same_as_flat_keys():
    new = without(QWEN3_8B, "rope_theta", "rope_scaling") | {
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}
    }
    assert read(new) == read(QWEN3_8B)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_yarn(place, name):
    rope = read(QWEN3_8B | {place: YARN | {name: "yarn"}}).decoder.rope
    assert rope == Rope(1e6, Yarn(4.0, 32768))


def test_yarn_with_everything_said():
    said = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5}
    rope = read(QWEN3_8B | {"rope_scaling": YARN | said | {"rope_type": "yarn"}}).decoder.rope
    assert rope == Rope(1e6, Yarn(4.0, 32768, 16.0, 2.0, False, 1.5))


def test_yarn_s_original_length_is_the_config_s_own_when_left_out():
    rope = read(QWEN3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 2}}).decoder.rope
    assert rope.yarn is not None
    assert rope.yarn.original_max_position_embeddings == 40960


@pytest.mark.parametrize(
    ("ends", "generation", "expected"),
    [
        (5, None, (5,)),
        (5, {"eos_token_id": [9, 5]}, (5, 9)),
        ([5, 6], {"eos_token_id": 2}, (2, 5, 6)),
        (None, {"eos_token_id": [3]}, (3,)),
        (None, {}, ()),
    ],
)
def test_end_ids_of_both_files(tmp_path, ends, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(TARGET | {"eos_token_id": ends}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_target_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": YARN | {"rope_type": "yarn", "mscale": 1}}, "mscale"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 5}}, "rope_theta is 1000000, but 5"),
        ({"rope_parameters": {"rope_type": "yarn", "type": "linear"}}, "rope_type"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_value_scale": 0.6}, "attention_value_scale"),
        ({"num_experts": 128}, "num_experts"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "qwen3_moe"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"architectures": ["DFlashDraftModel"]}, "drafter"),
        ({"dflash_config": {}}, "drafter"),
    ],
)
def test_what_is_not_implemented_is_named(change, named):
    with pytest.raises(LoadError, match=re.escape(named)) as caught:
        read(QWEN3_8B | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(set(QWEN3_8B) & {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings",
    "vocab_size", "model_type",
}))  # fmt: skip
def test_what_is_missing_is_named(key):
    with pytest.raises(LoadError, match=key if key != "model_type" else "qwen3"):
        read(without(QWEN3_8B, key))


def test_keys_that_change_nothing_are_ignored():
    harmless = {"pad_token_id": 3, "torch_dtype": "float16", "use_cache": False, "hello": [1]}
    assert read(QWEN3_8B | harmless) == read(QWEN3_8B)


def test_heads_are_their_own_keys_where_the_config_says_null():
    config = read(QWEN3_8B | {"num_key_value_heads": None})
    assert config.decoder.num_kv_heads == 32


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = sorted({*QWEN3_8B, "layer_types", "rope_parameters", "quantization_config"})


@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_nothing_but_load_errors_comes_of_a_strange_config(change):
    try:
        read(QWEN3_8B | change)
    except LoadError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(LoadError, match=r"config\.json"):
        read_target_config(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(LoadError, match=r"no config\.json in"):
        read_target_config(tmp_path)
