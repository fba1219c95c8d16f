"""Headers of the sizes of published DFlash2 drafters open; with a wrong name they do not."""

import json
from pathlib import Path

import numpy as np
import pytest
from dflash2_shapes import added

from jaxspec.checkpoint.load import open_drafter
from jaxspec.checkpoint.names import drafter_sources
from jaxspec.errors import LoadError
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import dflash2_for, qwen3

PUBLISHED = {"qwen3-4b": (2560, 9728), "qwen3-8b": (4096, 12288)}
"""Hidden and inner sizes; five layers and five features each."""


def published_config(name: str) -> dict:
    hidden, inner = PUBLISHED[name]
    return {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "block_size": 16,
        "mask_token_id": 151669,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "draft_vocab_size": 151936,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "max_position_embeddings": 40960,
            "vocab_size": 151936,
        },
    }


def published_shapes(name: str) -> dict:
    hidden, inner = PUBLISHED[name]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (4096, hidden),
        "self_attn.k_proj": (1024, hidden),
        "self_attn.v_proj": (1024, hidden),
        "self_attn.o_proj": (hidden, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {f"layers.{i}.{part}.weight": shape for i in range(5) for part, shape in layer.items()}
    shapes |= {"fc.weight": (hidden, 5 * hidden), "hidden_norm.weight": (hidden,)}
    shapes |= {"norm.weight": (hidden,)}
    return shapes | added(151936, hidden, 5, rank=256, taps=2, group=16)


def header_only(folder: Path, config: dict, shapes: dict) -> Path:
    """A folder whose weights are a hole in the file: names, shapes and offsets, and no numbers."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_headers_of_the_published_sizes(tmp_path, name):
    checkpoint = open_drafter(header_only(tmp_path, published_config(name), published_shapes(name)))
    config = checkpoint.config
    preset = dflash2_for(qwen3(name))
    assert config.decoder == preset.decoder and config.transition == preset.transition
    assert config.convolutions == preset.convolutions
    assert config.target_layer_ids == preset.target_layer_ids == (1, 9, 17, 25, 33)
    ours = {path: x.shape for path, x in parameter_shapes(DFlash(config)).items()}
    assert ours == {path: source.shape for path, source in drafter_sources(config).items()}
    if name == "qwen3-8b":
        assert checkpoint.num_bytes == 2 * 1_169_573_120, "the size that is published"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("gone", ["layers.4.attention_conv.base_kernel", "hidden_norm.weight"])
def test_headers_with_a_missing_or_an_extra_name(tmp_path, name, gone):
    config, shapes = published_config(name), published_shapes(name)
    missing = header_only(
        tmp_path / "missing", config, {key: shape for key, shape in shapes.items() if key != gone}
    )
    with pytest.raises(LoadError, match=f"no tensor {gone}"):
        open_drafter(missing)
    extra = header_only(tmp_path / "extra", config, shapes | {f"{gone}.extra": (1,)})
    with pytest.raises(LoadError, match=f"unknown tensor {gone}.extra"):
        open_drafter(extra)
