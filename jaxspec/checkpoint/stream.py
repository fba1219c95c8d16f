"""Streams tensors from files to the device, in pieces that are joined, transposed and cast there.

    file --read--> piece in host memory --copy--> piece on the device --assemble--> parameter

A few threads do this side by side, one parameter each. This keeps the disk, the bus and the device
busy at once, and the host never holds more than a piece per thread. If parameters are spread over
several devices, a piece is cut in the host's memory, and each device gets only what it keeps.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxspec.checkpoint.arranged import Arranged
from jaxspec.checkpoint.device_parts import is_cut_in_files, own_rows, parts_of
from jaxspec.checkpoint.finite import count_not_finite, is_finite
from jaxspec.checkpoint.names import Source
from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES, StoredTensor
from jaxspec.errors import LoadError, is_out_of_memory
from jaxspec.models.parameters import Params
from jaxspec.models.sharding import Placement
from pallas_kernels.fp8_product import quantised_blocks

Places = Mapping[str, Placement]
"""Where every parameter of a model is spread, by its path."""
BytesRead = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""

READERS = 8
PIECE_BYTES = 64 * 2**20


def stream_parameters(
    sources: dict[str, Source],
    stored: dict[str, StoredTensor],
    dtype: DTypeLike,
    progress: BytesRead | None = None,
    places: Places | None = None,
) -> Params:
    """All parameters as a nested tree, on the default device or where `places` says for each path.
    `progress` is called in this thread."""
    # Assembling takes twice the memory of a parameter, so the largest go first, while most is free.
    largest_first = sorted(sources, key=lambda path: -_num_bytes(sources[path], stored))
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint")
    try:
        place = {} if places is None else places
        read = lambda path: _placed(path, sources[path], stored, dtype, place)
        arrays = readers.map(read, largest_first)
        flat = {}
        for path, flat[path] in zip(largest_first, arrays):
            if progress is not None:
                progress(_num_bytes(sources[path], stored))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(bytes_of(sources, stored)) from error
    finally:
        readers.shutdown(cancel_futures=True)
    return unflatten_dict(flat, sep="/")


def read_tensor(tensor: StoredTensor) -> Shaped[np.ndarray, "..."]:
    """A whole tensor in host memory; meant for small ones."""
    return _read(tensor, 0, tensor.num_bytes).reshape(tensor.shape)


def bytes_of(sources: dict[str, Source], stored: dict[str, StoredTensor]) -> int:
    """Bytes of all stored tensors that the parameters are made from."""
    return sum(_num_bytes(source, stored) for source in sources.values())


def in_total(progress: Callable[[int, int], None] | None, total: int) -> BytesRead | None:
    """A function that adds up the bytes read, and calls `progress` with their sum and the total."""
    if progress is None:
        return None
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return report


def too_large(num_bytes: int) -> LoadError:
    return LoadError(
        f"{num_bytes / 1e9:.1f} GB of stored weights do not fit the device's free memory; load a "
        "smaller model, use a narrower dtype or free the device"
    )


def _num_bytes(source: Source, stored: dict[str, StoredTensor]) -> int:
    return sum(stored[name].num_bytes for name in source.tensors)


def _placed(
    path: str, source: Source, stored: dict[str, StoredTensor], dtype: DTypeLike, places: Places
) -> Shaped[Array, "..."] | Params:
    if not places:
        return _read_one(source, stored, dtype)
    if source.quantised:
        both = places[f"{path}/weight"], places[f"{path}/scales"]
        return _quantised_in_shards(source, stored, *both)
    place = places[path]
    if place.dimension is None or not is_cut_in_files(source):
        return place.placed(_parameter(source, stored, dtype))
    return _in_shards(source, stored, dtype, place)


def _in_shards(
    source: Source, stored: dict[str, StoredTensor], dtype: DTypeLike, place: Placement
) -> Shaped[Array, "..."]:
    """A parameter of which every device gets its shard."""
    dtype = jnp.dtype(dtype) if source.kept_as is None else source.kept_as
    assembled = [
        _assemble(
            pieces, source.transposed, dtype, own_rows(source, place, i), device
        ).block_until_ready()
        for pieces, (i, device) in zip(
            _pieces_of_devices(source, stored, place), place.devices, strict=True
        )
    ]
    if not all(map(is_finite, assembled)):
        raise _not_finite(source, stored, dtype)
    return place.joined(assembled)


def _quantised_in_shards(
    source: Source, stored: dict[str, StoredTensor], of_weight: Placement, of_scales: Placement
) -> Params:
    """The same for a matrix that is quantised. No block is cut, so devices quantise their parts."""
    of_devices = _pieces_of_devices(source, stored, of_weight)
    found = [
        _quantise(pieces, device)
        for pieces, (_, device) in zip(of_devices, of_weight.devices, strict=True)
    ]
    weights, scales = zip(*found)
    if not all(map(is_finite, scales)):
        raise _not_finite(source, stored, jnp.float32)
    return {"weight": of_weight.joined(weights), "scales": of_scales.joined(scales)}


def _pieces_of_devices(
    source: Source, stored: dict[str, StoredTensor], place: Placement
) -> list[list[Any]]:
    """For each of this process's devices, the pieces of the stored tensors that it keeps, on that
    device. Every byte of the files is read once."""
    of_devices: list[list[Any]] = [[] for _ in place.devices]
    start = 0
    for piece in (piece for name in source.tensors for piece in _pieces(stored[name])):
        for pieces, (i, device) in zip(of_devices, place.devices, strict=True):
            parts = parts_of(source, place, i, start, piece)
            pieces += [_put(part, device) for part in parts]
        start += len(piece)
    return of_devices


def _put(part: Shaped[np.ndarray, "..."], device: Any) -> Shaped[np.ndarray | Array, "..."]:
    if device.platform == "cpu":
        return part
    return jax.device_put(np.ascontiguousarray(part), device).block_until_ready()


def _read_one(
    source: Source, stored: dict[str, StoredTensor], dtype: DTypeLike
) -> Shaped[Array, "..."] | Params:
    """One parameter, or the two of a matrix that is quantised."""
    return _quantised(source, stored) if source.quantised else _parameter(source, stored, dtype)


def _parameter(
    source: Source, stored: dict[str, StoredTensor], dtype: DTypeLike
) -> Shaped[Array, "..."]:
    dtype = jnp.dtype(dtype) if source.kept_as is None else source.kept_as
    if source.spread:
        assembled = _spread(source, stored)
    else:
        pieces: list[Any] = [piece for name in source.tensors for piece in _on_device(stored[name])]
        turned = source.transposed, dtype, source.arranged
        assembled = _assemble(pieces, *turned).block_until_ready()
    if not is_finite(assembled):
        raise _not_finite(source, stored, dtype)
    return assembled


def _quantised(source: Source, stored: dict[str, StoredTensor]) -> Params:
    """A matrix in 8 bits, rounded once from the stored numbers, and its scales."""
    pieces: list[Any] = [piece for name in source.tensors for piece in _on_device(stored[name])]
    weight, scales = _quantise(pieces)
    if not is_finite(scales):
        raise _not_finite(source, stored, jnp.float32)
    return {"weight": weight, "scales": scales}


def _quantise(
    pieces: list[Shaped[np.ndarray | Array, "..."]], device: Any = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    if not isinstance(pieces[0], np.ndarray):
        return jax.block_until_ready(_quantise_on_device(pieces))
    with np.errstate(invalid="ignore"):  # what is not finite is found by the caller
        return jax.device_put(quantised_blocks(np.concatenate(pieces)), device)


@jax.jit
def _quantise_on_device(pieces: list[Shaped[Array, "..."]]) -> Any:
    return quantised_blocks(jnp.concatenate(pieces))


def _spread(source: Source, stored: dict[str, StoredTensor]) -> Float[Array, "..."]:
    numbers = [read_tensor(stored[name]).reshape(1, 1) for name in source.tensors]
    parts = [number.repeat(rows, 0) for number, rows in zip(numbers, source.spread, strict=True)]
    return jax.device_put(np.concatenate(parts).astype(source.kept_as))


def _not_finite(source: Source, stored: dict[str, StoredTensor], dtype: DTypeLike) -> LoadError:
    """The error that names the stored tensor, which is read once more to count."""
    with np.errstate(over="ignore", invalid="ignore"):  # becoming infinite is what is counted
        counts = {
            name: sum(count_not_finite(piece.astype(dtype)) for piece in _pieces(stored[name]))
            for name in source.tensors
        }
    name = max(counts, key=lambda name: counts[name])
    tensor = stored[name]
    what, total = f"{tensor.path}: tensor {name}", math.prod(tensor.shape)
    return not_finite_error(what, counts[name], total, dtype)


def not_finite_error(what: str, count: int, total: int, dtype: DTypeLike) -> LoadError:
    return LoadError(
        f"{what} has {count} of {total} numbers that are not finite (NaN or infinite) in "
        f"{jnp.dtype(dtype)}; download the checkpoint again, or use another one"
    )


def _on_device(tensor: StoredTensor) -> Iterator[Shaped[np.ndarray | Array, "piece ..."]]:
    """The pieces of a tensor, on the device. A CPU has them already."""
    if jax.default_backend() == "cpu":
        yield from _pieces(tensor)
        return
    for piece in _pieces(tensor):
        # The host holds its copy until the piece has arrived.
        yield jax.device_put(piece).block_until_ready()


def _assemble(
    pieces: list[Shaped[np.ndarray | Array, "..."]],
    transposed: bool,
    dtype: jnp.dtype,
    arranged: Arranged | None = None,
    device: Any = None,
) -> Shaped[Array, "..."]:
    if not isinstance(pieces[0], np.ndarray):
        return _assemble_on_device(pieces, transposed, dtype, arranged)
    # In numpy, because compiling a program for each shape would take longer than reading the
    # weights of a small model.
    joined = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    joined = joined if arranged is None else arranged(joined)
    with np.errstate(over="ignore"):  # what becomes infinite is found by the caller
        cast = (joined.T if transposed else joined).astype(dtype, order="C", copy=False)
    return jax.device_put(cast, device)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _assemble_on_device(
    pieces: list[Shaped[Array, "..."]],
    transposed: bool,
    dtype: jnp.dtype,
    arranged: Arranged | None,
) -> Shaped[Array, "..."]:
    joined = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    joined = joined if arranged is None else arranged(joined)
    return (joined.T if transposed else joined).astype(dtype)


def _pieces(tensor: StoredTensor) -> Iterator[Shaped[np.ndarray, "piece ..."]]:
    """The tensor cut into pieces along its first axis."""
    length = tensor.shape[0]
    slice_bytes = tensor.num_bytes // length
    step = max(1, PIECE_BYTES // slice_bytes)
    for start in range(0, length, step):
        count = min(step, length - start)
        flat = _read(tensor, start * slice_bytes, count * slice_bytes)
        yield flat.reshape(count, *tensor.shape[1:])


def _read(tensor: StoredTensor, start: int, num_bytes: int) -> Shaped[np.ndarray, " items"]:
    buffer = np.empty(num_bytes, np.uint8)
    file = os.open(tensor.path, os.O_RDONLY)
    try:
        done = 0
        while done < num_bytes:
            # Read into our own memory: pages of a mapped file would pile up in this process.
            count = os.preadv(file, [buffer[done:]], tensor.offset + start + done)
            if count == 0:
                raise LoadError(f"{tensor.path} ended while it was read; download it again")
            done += count
    finally:
        os.close(file)
    return buffer.view(NUMPY_DTYPES[tensor.dtype])
