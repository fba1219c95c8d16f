"""FP8 targets and Qwen3.5 are read to the devices that keep them, each its own rows and columns."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from golden_pair import GOLDENS
from safetensors.numpy import save_file
from trained_hybrid_pair import PAIR

from jaxspec.checkpoint import stream
from jaxspec.checkpoint.conversion import convert
from jaxspec.checkpoint.names import Source
from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.placement import places_of, spread_params
from jaxspec.layers.shards import Shards

FP8_BLOCK, FP8_CHANNEL = (GOLDENS / name / "target" for name in ("fp8-block", "fp8-channel"))
HYBRID = PAIR / "target"


def flat(params: Any) -> dict:
    return flatten_dict(params, sep="/")


def read_like_cut(folder: Path, devices: int, **options) -> dict:
    """The parameters as they are read for so many devices, after comparing them with those that
    were read as a whole and then cut."""
    whole = open_models(folder, dtype="float32", **options)
    expected = spread_params(with_shards(whole.models, Shards(devices)), whole.params)
    read = open_models(folder, dtype="float32", tensor_parallel_size=devices, **options)
    found, expected = flat(read.params), flat(expected)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].sharding == array.sharding and found[path].dtype == array.dtype, path
        assert np.asarray(found[path]).tobytes() == np.asarray(array).tobytes(), path
    return found


@pytest.mark.parametrize(
    ("folder", "devices"), [(FP8_BLOCK, 2), (FP8_CHANNEL, 4), (HYBRID, 2)], ids=str
)
@pytest.mark.parametrize("piece_bytes", [5000, 2**26])
def test_reading_gives_what_cutting_gives(folder, devices, piece_bytes, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    read_like_cut(folder, devices)


@pytest.mark.parametrize("folder", [FP8_BLOCK, HYBRID], ids=str)
def test_converted_folders(folder, tmp_path):
    convert(folder, tmp_path)
    read_like_cut(tmp_path, 2)


def test_scales_are_cut_as_their_numbers_are():
    found = read_like_cut(FP8_BLOCK, 2)
    part = lambda path: found[f"target/layers_0/{path}"].addressable_shards[1].data
    assert part("attention/qkv/weight").shape == (512, 256)
    assert part("attention/qkv/scales").shape == (4, 2)
    assert part("attention/out/weight").shape == (256, 256)
    assert part("attention/out/scales").shape == (2, 2)
    whole = flat(open_models(FP8_BLOCK, dtype="float32").params)
    scales = whole["target/layers_0/attention/qkv/scales"]
    assert np.array_equal(part("attention/qkv/scales"), scales[jnp.array([2, 3, 5, 7])])
    per_channel = read_like_cut(FP8_CHANNEL, 2)
    assert per_channel["target/layers_0/attention/out/scales"].is_fully_replicated
    assert not per_channel["target/layers_0/attention/qkv/scales"].is_fully_replicated


def test_one_scale_for_a_whole_matrix(tmp_path):
    """It is repeated for every output, and each device has those of its own."""
    numbers = {name: np.float32([i + 1]) for i, name in enumerate("qkv")}
    save_file(numbers, tmp_path / "model.safetensors")
    path = "layers_0/attention/qkv/scales"
    shapes = {name: (1,) for name in numbers}
    source = Source(shapes, kept_as=jnp.dtype(jnp.float32), spread=(512, 256, 256))
    whole = open_models(FP8_CHANNEL, dtype="float32").models
    places = places_of(with_shards(whole, Shards(4)))["target"]
    read = stream.stream_parameters(
        {path: source}, stored_tensors(tmp_path), jnp.bfloat16, places=places
    )
    for shard in flat(read)[path].addressable_shards:
        assert shard.data.dtype == jnp.float32
        assert shard.data[:, 0].tolist() == [1] * 128 + [2] * 64 + [3] * 64


def plain_tensors() -> dict[str, np.ndarray]:
    """The target of the goldens in float32."""
    params = flat(open_models(FP8_CHANNEL, dtype="float32").params["target"])
    names = {
        "attention/qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention/out": ("self_attn.o_proj",),
        "mlp/gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp/down": ("mlp.down_proj",),
    }
    ends = {3: [512, 768], 2: [512], 1: []}
    found = {}
    for path, weight in params.items():
        layer, _, of_layer = path.partition("/")
        matrix = of_layer.removesuffix("/weight")
        if matrix not in names:
            continue
        numbers = np.asarray(weight.astype(jnp.float32) * params[path[:-6] + "scales"])
        prefix = f"model.{layer.replace('_', '.')}"
        parts = np.split(numbers, ends[len(names[matrix])])
        found |= {f"{prefix}.{n}.weight": p for n, p in zip(names[matrix], parts, strict=True)}
    return found


def test_a_target_is_quantised_while_it_is_read(tmp_path):
    """Each device rounds its own blocks, which are those of the whole matrix."""
    config = json.loads((FP8_CHANNEL / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    others = {
        f"model.{name}": stream.read_tensor(tensor).astype(np.float32)
        for name, tensor in stored_tensors(FP8_CHANNEL).items()
        if "_proj" not in name
    }
    save_file(others | plain_tensors(), tmp_path / "model.safetensors")
    found = read_like_cut(tmp_path, 2, quantization="fp8")
    assert found["target/layers_0/mlp/down/weight"].dtype == jnp.float8_e4m3fn
    assert not found["target/layers_0/mlp/down/scales"].is_fully_replicated
