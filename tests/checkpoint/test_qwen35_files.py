"""Reads folders of Qwen3.5: of text alone, and with a vision part beside it."""

import copy
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import BF16, TARGET, write

from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.load import open_target
from jaxspec.checkpoint.target_config import target_config_of
from jaxspec.errors import LoadError
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen35Config
from jaxspec.training.export import export_target
from oracles import hybrid_draws, qwen35_shapes, records

LAYOUT = json.loads((records.DATA / "qwen35_layout.json").read_text())
WITH_VISION = LAYOUT["config"]
TEXT = WITH_VISION["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
}


def read(config: dict) -> Qwen35Config:
    read = target_config_of(Entries(config, "config.json"))
    assert isinstance(read, Qwen35Config)
    return read


def text_tensors(prefix: str = qwen35_shapes.TEXT_ONLY, dtype: type = np.float32) -> dict:
    """The same numbers, whatever stands before their names."""
    shapes = qwen35_shapes.shapes(TEXT)
    return {
        name.replace(qwen35_shapes.TEXT_ONLY, prefix): hybrid_draws.weight(name, shape).astype(
            dtype
        )
        for name, shape in shapes.items()
    }


def whole_tensors() -> dict:
    """Those of a folder with a vision part, in which everything but the text model is NaN."""
    others = {name: np.full(shape, np.nan, np.float32) for name, shape in LAYOUT["tensors"].items()}
    return others | text_tensors(qwen35_shapes.VISION_LANGUAGE)


def test_the_recorded_layout_has_the_text_model_that_the_tests_draw():
    drawn = {name: list(x.shape) for name, x in whole_tensors().items()}
    assert drawn == LAYOUT["tensors"]
    assert sum(name.startswith("mtp.") for name in drawn) == 15
    assert sum(name.startswith("model.visual.") for name in drawn) == 21


def test_27b():
    config = read(QWEN35_27B)
    decoder = config.decoder
    assert (decoder.hidden_size, decoder.intermediate_size) == (5120, 17408)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (24, 4, 256)
    assert decoder.rope == Rope(1e7, rotated=64) and decoder.rms_norm_eps == 1e-6
    assert config.delta == DeltaSizes(16, 48, 128, 128, taps=4)
    assert config.layer_kinds == ("delta", "delta", "delta", "attention") * 16
    assert config.vocab_size == 248320 and not config.tie_word_embeddings
    assert config.eos_token_ids == (248044,)


def test_both_layouts_say_the_same():
    assert read(TEXT) == read(WITH_VISION)


@pytest.mark.parametrize("interval", [4, 2, 3])
def test_an_interval_instead_of_layer_types(interval):
    config = {key: value for key, value in TEXT.items() if key != "layer_types"}
    kinds = read(config | {"full_attention_interval": interval}).layer_kinds
    assert [i for i, kind in enumerate(kinds) if kind == "attention"] == [interval - 1] + (
        [3] if interval == 2 else []
    )


def test_layer_types_come_before_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    read_kinds = read(TEXT | {"layer_types": kinds}).layer_kinds
    assert read_kinds == ("attention", "delta", "delta", "attention")


def test_the_text_model_of_a_folder_with_a_vision_part(tmp_path, caplog):
    with_vision = open_target(write(tmp_path / "whole", WITH_VISION, whole_tensors(), shards=3))
    with caplog.at_level(logging.INFO, "jaxspec"):
        open_target(tmp_path / "whole")
    assert "21 tensors of the vision part" in caplog.text
    assert "15 tensors of the multi-token prediction part" in caplog.text
    text_only = open_target(write(tmp_path / "text", TEXT, text_tensors()))
    ours, others = with_vision.load(jnp.float32), text_only.load(jnp.float32)
    assert jax.tree.structure(ours) == jax.tree.structure(others)
    jax.tree.map(np.testing.assert_array_equal, ours, others)


def test_a_tied_head_may_be_stored_too(tmp_path):
    config = copy.deepcopy(WITH_VISION) | {"tie_word_embeddings": True}
    config["text_config"]["tie_word_embeddings"] = True
    params = open_target(write(tmp_path / "tied", config, whole_tensors())).load(jnp.float32)
    assert "head" not in params


def test_what_decays_stays_in_float32(tmp_path):
    """Matrices have the dtype that is asked for; rates, biases and norms are small, and stay."""
    folder = write(tmp_path / "text", TEXT, text_tensors(dtype=BF16))
    params = open_target(folder).load(jnp.bfloat16)
    delta = params["layers_0"]["delta"]
    assert {delta[name].dtype for name in ("log_rate", "decay_bias")} == {jnp.dtype("float32")}
    assert params["norm"]["scale"].dtype == jnp.float32
    assert delta["inputs"]["kernel"].dtype == jnp.bfloat16
    stored = text_tensors(dtype=BF16)["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["norm"]["scale"], 1 + stored)


def test_a_written_folder_reads_back_bit_for_bit(tmp_path):
    checkpoint = open_target(write(tmp_path / "text", TEXT, text_tensors(dtype=BF16)))
    params = checkpoint.load(jnp.float32)
    export_target(tmp_path / "again", checkpoint.config, params)
    again = open_target(tmp_path / "again")
    assert again.config == checkpoint.config
    jax.tree.map(np.testing.assert_array_equal, again.load(jnp.float32), params)


def refused(folder, *words: str) -> None:
    with pytest.raises(LoadError) as caught:
        open_target(folder)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("layout", [qwen35_shapes.TEXT_ONLY, qwen35_shapes.VISION_LANGUAGE])
@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",
        "layers.0.linear_attn.A_log",
        "layers.1.linear_attn.conv1d.weight",
        "layers.2.linear_attn.in_proj_z.weight",
        "layers.3.self_attn.q_norm.weight",
        "layers.3.mlp.up_proj.weight",
    ],
)
def test_missing_tensors(tmp_path, layout, name):
    config = TEXT if layout == qwen35_shapes.TEXT_ONLY else WITH_VISION
    tensors = text_tensors(layout)
    del tensors[layout + name]
    refused(write(tmp_path / "missing", config, tensors), name)


def test_a_missing_head(tmp_path):
    tensors = whole_tensors()
    del tensors["lm_head.weight"]
    refused(write(tmp_path / "missing", WITH_VISION, tensors), "lm_head.weight")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.q_proj.weight",
        "layers.0.linear_attn.conv1d.bias",
        "layers.4.linear_attn.A_log",
        "layers.3.self_attn.sinks",
        "layers.3.mlp.gate.weight",
    ],
)
def test_unknown_tensors(tmp_path, name):
    tensors = text_tensors() | {f"model.{name}": np.zeros((2, 2), np.float32)}
    refused(write(tmp_path / "unknown", TEXT, tensors), name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.3.self_attn.q_proj.weight", (4 * 32, 64)),  # without gates
        ("layers.0.linear_attn.conv1d.weight", (128, 1, 3)),
        ("layers.0.linear_attn.conv1d.weight", (128, 4)),
        ("layers.0.linear_attn.norm.weight", (64,)),
        ("layers.1.linear_attn.dt_bias", (2,)),
        ("layers.1.linear_attn.in_proj_qkv.weight", (96, 64)),
        ("embed_tokens.weight", (96, 64)),
    ],
)
def test_wrong_shapes(tmp_path, name, shape):
    tensors = text_tensors() | {f"model.{name}": np.zeros(shape, np.float32)}
    refused(write(tmp_path / "wrong", TEXT, tensors), name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_output_gate": False}, ["attn_output_gate"]),
        ({"output_gate_type": "sigmoid"}, ["output_gate_type"]),
        ({"mamba_ssm_dtype": "bfloat16"}, ["mamba_ssm_dtype"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"num_experts": 8}, ["num_experts"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"linear_num_value_heads": 3}, ["linear_num_value_heads", "multiple"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim"]),
        ({"linear_key_head_dim": 0}, ["linear_key_head_dim"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"layer_types": ["linear_attention"] * 3}, ["layer_types"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
        ({"layer_types": None, "full_attention_interval": 0}, ["full_attention_interval"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta"]),
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, ["SequenceClassification"]),
        ({"model_type": "qwen3_5_moe_text"}, ["qwen3_5_moe_text"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_are_refused(changes, words):
    with pytest.raises(LoadError) as caught:
        read(TEXT | changes)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear"},
        {"partial_rotary_factor": 0.3},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 1 / 32},
        {"spread": 2},
    ],
)
def test_rotary_embeddings_that_are_refused(changes):
    with pytest.raises(LoadError) as caught:
        read(TEXT | {"rope_parameters": TEXT["rope_parameters"] | changes})
    assert "\n" not in str(caught.value) and "rope_parameters" in str(caught.value)


def test_a_vision_folder_quantised_or_of_another_family():
    for changes, word in [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "qwen3_5_moe"}, "qwen3_5_moe"),
        ({"text_config": TARGET}, "model_type"),
        ({"text_config": None}, "text_config"),
    ]:
        with pytest.raises(LoadError, match=word):
            read(WITH_VISION | changes)
