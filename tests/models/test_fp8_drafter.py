"""A drafter in FP8 equals the same drafter in float32 whose matrices were rounded by hand."""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.cache.block import block_after
from jaxspec.checkpoint.load import open_drafter
from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.checkpoint.stream import read_tensor
from jaxspec.models.dflash import DFlash
from oracles import draws, records
from oracles.more_heads import with_more_heads
from oracles.paging import PAGE_SIZE, scattered_pages, spoiled_cache

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
KINDS = ("a", "dflash2", "dspark")
STARTS = np.array([37, 22], np.int32)
"""Tokens before the blocks of two slots."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> pathlib.Path:
    draft = GOLDENS / request.param / "draft"
    return with_more_heads(draft, tmp_path_factory.mktemp("drafter"))


def nearest_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Three bits after the leading one, ties to even; below 2^-6 multiples of 2^-9."""
    exponents = np.floor(np.log2(np.maximum(abs(numbers), 2.0**-6)))
    steps = 2.0 ** (exponents - 3)
    return np.round(numbers / steps) * steps


def rounded_by_hand(matrix: np.ndarray) -> np.ndarray:
    """What a matrix in FP8 stands for, one block of 128 x 128 after the other."""
    found = np.empty(matrix.shape, np.float32)
    for row in range(0, matrix.shape[0], 128):
        for column in range(0, matrix.shape[1], 128):
            part = np.s_[row : row + 128, column : column + 128]
            scale = abs(matrix[part]).max() / np.float32(448)
            found[part] = nearest_e4m3(matrix[part] / scale) * scale
    return found


def with_rounded_matrices(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The drafter in float32 with the projections of its layers rounded by hand."""
    tensors = {
        name: read_tensor(tensor).astype(np.float32)
        for name, tensor in stored_tensors(source).items()
    }
    matrices = [name for name in tensors if name.startswith("layers.") and "_proj." in name]
    assert len(matrices) % 7 == 0 and matrices
    rounded = {name: rounded_by_hand(tensors[name]) for name in matrices}
    folder.mkdir(exist_ok=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    save_file(tensors | rounded, folder / "model.safetensors")
    return folder


def drafted(folder: pathlib.Path, quantization: str | None) -> np.ndarray:
    """Hidden states of a block in each of two slots, over pages with a context."""
    checkpoint = open_drafter(folder, quantization=quantization)
    config, params = checkpoint.config, checkpoint.load(jnp.float32)
    assert (config.decoder.fp8 is not None) == (quantization is not None)
    model = DFlash(config)
    apply = functools.partial(model.apply, {"params": params})
    hidden, rows, longest = config.decoder.hidden_size, config.rows, int(STARTS.max())
    features = draws.features("features", (longest, len(config.target_layer_ids) * hidden))
    blocks = np.stack([draws.features(f"block at {start}", (rows, hidden)) for start in STARTS])
    slots, table = np.arange(2, dtype=np.int32), scattered_pages(2, positions=longest + rows)
    block = lambda lengths, counts, width: block_after(
        *map(jnp.asarray, (slots, lengths, counts, table)), width, PAGE_SIZE
    )
    cache = spoiled_cache(model, table, content=np.nan)
    write = jax.jit(functools.partial(apply, method="write_context"))
    cache = write(np.stack([features] * 2), block(0 * STARTS, STARTS, longest), cache)
    last, _ = jax.jit(apply)(blocks, block(STARTS, np.full(2, rows, np.int32), rows), cache)
    return np.asarray(last)


def test_hidden_states_are_those_of_the_rounded_matrices(folder, tmp_path):
    found = drafted(folder, "fp8")
    by_hand = drafted(with_rounded_matrices(folder, tmp_path), None)
    assert records.relative_error(found, by_hand) < 1e-5
    assert records.relative_error(found, drafted(folder, None)) > 1e-3


def test_only_the_matrices_of_the_layers_are_in_8_bits(folder):
    """Not those of convolutions, of heads and of the projection of features."""
    params = open_drafter(folder, quantization="fp8").load(jnp.bfloat16)
    in_8_bits = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if leaf.dtype == jnp.float8_e4m3fn
    }
    matrices = "attention/qkv", "attention/out", "mlp/gate_up", "mlp/down"
    layers = [name for name in params if name.startswith("layers_")]
    assert in_8_bits == {f"{layer}/{one}/weight" for layer in layers for one in matrices}
    scales = params["layers_0"]["attention"]["qkv"]["scales"]
    assert (scales.shape, scales.dtype) == ((3, 1), jnp.float32)
    assert params["feature_projection"]["kernel"].dtype == jnp.bfloat16
