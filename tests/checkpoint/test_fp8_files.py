"""FP8 targets: their numbers stay as they are, and what is half understood is refused by name."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny_checkpoints import BF16

from jaxspec import convert, train
from jaxspec.checkpoint import stream
from jaxspec.checkpoint.conversion import convert as converted
from jaxspec.checkpoint.entries import Entries
from jaxspec.checkpoint.fp8_config import fp8_layout_of, read_fp8_layout
from jaxspec.checkpoint.fp8_names import fp8_sources
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.names import target_sources
from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES, stored_tensors
from jaxspec.checkpoint.stream import read_tensor
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.parameters import parameter_axes, parameter_shapes
from jaxspec.models.presets import qwen3
from jaxspec.models.qwen3 import Qwen3
from oracles.widened import widened
from pallas_kernels.fp8_product import E4M3

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
BLOCK, CHANNEL = GOLDENS / "fp8-block" / "target", GOLDENS / "fp8-channel" / "target"
Q = "model.layers.0.self_attn.q_proj.weight"
SCALE = {BLOCK: f"{Q}_scale_inv", CHANNEL: f"{Q}_scale"}
NAMES = {np.dtype(dtype): name for name, dtype in NUMPY_DTYPES.items()}


@functools.cache
def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    named = {name: read_tensor(tensor) for name, tensor in stored_tensors(folder).items()}
    return {f"model.{name}": tensor for name, tensor in named.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], dtypes=None) -> Path:
    """The library's numpy module writes no 8-bit floats, so this is the format by hand."""
    header, start = {}, 0
    for name, tensor in tensors.items():
        end, dtype = start + tensor.nbytes, (dtypes or {}).get(name, NAMES[tensor.dtype])
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    content = b"".join(tensor.tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    return folder


def flat(params) -> dict[str, Any]:
    return flatten_dict(params, sep="/")


def assert_same(found, expected) -> None:
    one, other = flat(found), flat(expected)
    assert one.keys() == other.keys()
    for path in one:
        assert one[path].dtype == other[path].dtype, path
        assert np.asarray(one[path]).tobytes() == np.asarray(other[path]).tobytes(), path


@pytest.mark.parametrize("folder", [BLOCK, CHANNEL], ids=["block", "channel"])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_numbers_stay_as_stored_and_scales_are_joined_as_they_are(folder, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # a CPU assembles on the host
    monkeypatch.setattr(stream, "PIECE_BYTES", 10_000)
    target, stored = open_target(folder), tensors_of(folder)
    params, suffix = flat(target.load(jnp.bfloat16)), SCALE[folder].rpartition("weight")[2]
    assert target.config.decoder.fp8 == Fp8(blocks=folder == BLOCK)
    assert target.exact_dtype == jnp.bfloat16
    shapes = parameter_shapes(Qwen3(target.config, dtype=jnp.bfloat16))
    assert {p: (x.shape, x.dtype) for p, x in params.items()} == {
        path: (shape.shape, shape.dtype) for path, shape in shapes.items()
    }
    for path, names in {
        "layers_1/attention/qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "layers_2/mlp/gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers_0/mlp/down": ["mlp.down_proj"],
    }.items():
        layer = path.split("/")[0].replace("_", ".")
        parts = [stored[f"model.{layer}.{name}.weight"] for name in names]
        scales = [stored[f"model.{layer}.{name}.weight{suffix}"] for name in names]
        assert np.asarray(params[f"{path}/weight"]).tobytes() == np.concatenate(parts).tobytes()
        wanted = np.concatenate(scales).astype(np.float32)
        np.testing.assert_array_equal(params[f"{path}/scales"], wanted)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(np.float32), BF16])
def test_scales_of_any_width(tmp_path, dtype):
    tensors = {
        name: tensor.astype(dtype) if name.endswith("scale_inv") else tensor
        for name, tensor in tensors_of(BLOCK).items()
    }
    folder = write(tmp_path, config_of(BLOCK), tensors)
    found = flat(open_target(folder).load(jnp.bfloat16))["layers_0/attention/qkv/scales"]
    parts = [tensors[f"model.layers.0.self_attn.{p}_proj.weight_scale_inv"] for p in "qkv"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.concatenate(parts).astype(np.float32))


def as_compressed(strategy: str, **weights) -> dict[str, Any]:
    config = copy.deepcopy(config_of(CHANNEL))
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"strategy": strategy} | weights
    if strategy == "block":
        group["input_activations"] |= {"strategy": "group", "group_size": 128}
    return config


def test_compressed_tensors_in_blocks(tmp_path):
    tensors = {name.removesuffix("_inv"): tensor for name, tensor in tensors_of(BLOCK).items()}
    config = as_compressed("block", block_structure=[128, 128])
    found = open_target(write(tmp_path, config, tensors))
    assert found.config == open_target(BLOCK).config
    assert_same(found.load(jnp.bfloat16), open_target(BLOCK).load(jnp.bfloat16))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("official", [True, False])
def test_one_scale_for_a_whole_matrix(tmp_path, shape, official):
    scales = {n: i for i, n in enumerate(n for n in tensors_of(CHANNEL) if n.endswith("_scale"))}
    tensors = {
        f"{name}_inv" if official and name in scales else name: np.full(
            shape, 0.5 + scales[name], BF16
        )
        if name in scales
        else tensor
        for name, tensor in tensors_of(CHANNEL).items()
    }
    config = as_compressed("tensor")
    if official:
        own = config_of(BLOCK)["quantization_config"] | {"weight_block_size": None}
        config["quantization_config"] = own
    target = open_target(write(tmp_path, config, tensors))
    found = np.asarray(flat(target.load(jnp.bfloat16))["layers_0/attention/qkv/scales"])
    each = [0.5 + scales[f"model.layers.0.self_attn.{p}_proj.weight_scale"] for p in "qkv"]
    assert target.config.decoder.fp8 == Fp8(blocks=False)
    np.testing.assert_array_equal(found[:, 0], np.repeat(np.float32(each), [512, 256, 256]))


@pytest.mark.parametrize(
    ("changed", "dtypes", "message"),
    [
        ({SCALE[BLOCK]: None}, {}, "no tensor .*q_proj.weight_scale_inv, expected one .4, 2."),
        ({SCALE[BLOCK]: np.ones((2, 4), BF16)}, {}, r"is \[2, 4\], expected \[4, 2\]"),
        ({SCALE[BLOCK]: np.ones((4, 2), np.int32)}, {}, "is I32, expected BF16 or F16 or F32"),
        ({Q: np.ones((512, 256), BF16)}, {}, "is BF16, expected F8_E4M3: all projections"),
        ({}, {Q: "F8_E5M2"}, "is F8_E5M2, expected F8_E4M3"),
        ({f"{Q[:-6]}input_scale": np.ones(1, BF16)}, {}, "input_scale, a fixed scale of activ"),
        ({"model.norm.weight": np.ones(256, E4M3)}, {}, "norm.weight is F8_E4M3, expected BF16"),
        ({f"{Q}_scale": np.ones((4, 2), BF16)}, {}, "unknown tensor .*q_proj.weight_scale,"),
    ],
)
def test_tensors_that_are_half_understood(tmp_path, changed, dtypes, message):
    tensors = {n: t for n, t in (tensors_of(BLOCK) | changed).items() if t is not None}
    folder = write(tmp_path, config_of(BLOCK), tensors, dtypes)
    with pytest.raises(LoadError, match=message) as refused:
        open_target(folder)
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


@pytest.mark.parametrize("what", [Q, SCALE[BLOCK]])
def test_numbers_that_are_none(tmp_path, what):
    tensors = dict(tensors_of(BLOCK))
    tensors[what] = tensors[what].copy()
    tensors[what][1, 1] = np.nan
    target = open_target(write(tmp_path, config_of(BLOCK), tensors))
    with pytest.raises(LoadError, match=f"{what[6:]} has 1 of .* not finite"):
        target.load(jnp.bfloat16)


def test_8_bit_tensors_without_a_word_in_the_config(tmp_path):
    config = {k: v for k, v in config_of(BLOCK).items() if k != "quantization_config"}
    folder = write(tmp_path, config, tensors_of(BLOCK))
    with pytest.raises(LoadError, match="q_proj.weight is F8_E4M3, .*if quantization_config in"):
        open_target(folder)


OFFICIAL = config_of(BLOCK)["quantization_config"]
COMPRESSED = config_of(CHANNEL)["quantization_config"]


def within_group(**changed) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    merged = {k: group[k] | v if isinstance(group[k], dict) else v for k, v in changed.items()}
    return COMPRESSED | {"config_groups": {"group_0": group | merged}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (OFFICIAL | {"quant_method": "awq"}, 'quant_method is "awq".*fp8 or compressed-tensors'),
        (OFFICIAL | {"fmt": "e5m2"}, 'fmt is "e5m2".*it is e4m3'),
        (OFFICIAL | {"activation_scheme": "static"}, 'is "static".*it is dynamic'),
        (OFFICIAL | {"weight_block_size": [64, 128]}, r"\[64, 128\].*it is \[128, 128\]"),
        ({k: OFFICIAL[k] for k in ("quant_method", "fmt")}, r"no weight_block_size, .*\[128, 128"),
        (OFFICIAL | {"scale_fmt": "ue8m0"}, 'scale_fmt is "ue8m0"'),
        (OFFICIAL | {"expert_dtype": "fp4"}, 'expert_dtype is "fp4".*it is absent'),
        (COMPRESSED | {"format": "pack-quantized"}, 'format is "pack-quantized"'),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is .*it is null"),
        (COMPRESSED | {"config_groups": {}}, "has 0 groups, expected one"),
        (within_group(weights={"num_bits": 4}), "num_bits is 4.*it is 8"),
        (within_group(weights={"type": "int"}), 'type is "int".*it is float'),
        (within_group(weights={"strategy": "group"}), 'strategy is "group".*block, channel or'),
        (within_group(weights={"symmetric": False}), "symmetric is false"),
        (within_group(input_activations={"dynamic": False}), "dynamic is false.*it is true"),
        (within_group(input_activations={"strategy": "tensor"}), 'strategy is "tensor".*token'),
        (within_group(targets=["re:.*q_proj"]), "targets is .*linear"),
        (within_group(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_configs_that_are_half_understood(entry, message):
    with pytest.raises(LoadError, match=message) as refused:
        fp8_layout_of(Entries({"quantization_config": entry}, "config.json"))
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


def test_blocks_that_end_within_a_joined_matrix(tmp_path):
    config = config_of(BLOCK) | {"num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="head_dim is 64, expected a multiple of 128"):
        open_target(tmp_path)


def test_a_drafter_in_fp8_is_refused(tmp_path):
    draft = GOLDENS / "fp8-block" / "draft"
    config = json.loads((draft / "config.json").read_text()) | {"quantization_config": OFFICIAL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="quantization_config is .*not implemented"):
        open_drafter(tmp_path)


def test_drafters_are_not_trained_on_fp8(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("import os\n" * 100)
    flags = ["--target", str(BLOCK), "--data", str(tmp_path / "text.txt")]
    assert train.main([*flags, "--out", str(tmp_path / "out")]) == 2
    assert "has FP8 weights, expected 16 or 32 bits for training" in capsys.readouterr().err


@pytest.mark.parametrize("folder", [BLOCK, CHANNEL], ids=["block", "channel"])
def test_conversion_keeps_every_bit(tmp_path, folder):
    assert "weights in bfloat16 and FP8" in converted(folder, tmp_path / "orbax")
    found, expected = open_target(tmp_path / "orbax"), open_target(folder)
    assert found.config == expected.config and found.exact_dtype == jnp.bfloat16
    assert_same(found.load(jnp.float32), expected.load(jnp.float32))


def test_a_target_is_quantised_once_while_it_is_read_or_converted(tmp_path, capsys):
    source = widened(BLOCK, tmp_path / "wide", noise=1e-2)
    rounded = open_target(source, "fp8")
    params, exact = flat(rounded.load(jnp.float32)), flat(open_target(source).load(jnp.float32))
    assert rounded.config.decoder.fp8 == Fp8(blocks=True)
    shapes = parameter_shapes(Qwen3(rounded.config, dtype=jnp.float32))
    assert {path: x.dtype for path, x in params.items()} == {p: x.dtype for p, x in shapes.items()}
    for path in (path for path in exact if path.endswith("/kernel")):
        weight, scales = (
            np.asarray(params[path.replace("kernel", n)]) for n in ("weight", "scales")
        )
        assert weight.dtype == E4M3 and scales.dtype == np.float32
        again = weight.astype(np.float32) * scales.repeat(128, 0).repeat(128, 1)
        off = abs(again - np.asarray(exact[path]).T)
        assert off.max() <= abs(again).max() / 16 and off.max() > 0
    assert (np.asarray(params["norm/scale"]) == np.asarray(exact["norm/scale"])).all()
    assert convert.main([str(source), str(tmp_path / "fp8"), "--quantization", "fp8"]) == 0
    assert read_fp8_layout(tmp_path / "fp8").fp8 == Fp8(blocks=True)
    assert_same(open_target(tmp_path / "fp8").load(jnp.float32), rounded.load(jnp.float32))
    capsys.readouterr()
    drafter = str(BLOCK.parent / "draft")
    assert convert.main([drafter, str(tmp_path / "no"), "--quantization", "fp8"]) == 2
    assert "is a drafter, expected a target" in capsys.readouterr().err
    converted(Path(source), tmp_path / "plain")
    with pytest.raises(UsageError, match="convert the source with --quantization fp8"):
        open_target(tmp_path / "plain", "fp8")


@pytest.mark.parametrize("name", ["qwen3-4b-fp8", "qwen3-8b-fp8"])
def test_a_published_shape_has_the_parameters_of_its_files(name):
    config = qwen3(name)
    plain = qwen3(name.removesuffix("-fp8"))
    entries = Entries({"quantization_config": OFFICIAL}, "config.json")
    layout = fp8_layout_of(entries)
    sources = fp8_sources(target_sources(plain), layout)
    model = Qwen3(config, dtype=jnp.bfloat16)
    shapes = parameter_shapes(model)
    assert {path: source.shape for path, source in sources.items()} == {
        path: shape.shape for path, shape in shapes.items()
    }
    assert shapes["layers_0/mlp/down/weight"].dtype == E4M3
    [heads, *_] = parameter_axes(model)["layers_0/attention/qkv/scales"][0]
    assert (heads.name, heads.size, heads.unit) == ("heads", 32, 1)
