"""Checkpoints in our own layout: parameters in Orbax's format, configs and tokenizer files.

folder/config.json, generation_config.json, tokenizer.json, ...   as in the source
folder/params/                                                    our parameter tree
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxspec.checkpoint.finite import count_not_finite, is_finite
from jaxspec.checkpoint.names import Source, in_words
from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES
from jaxspec.checkpoint.stream import Places, not_finite_error, too_large
from jaxspec.errors import LoadError, is_out_of_memory, one_line
from jaxspec.models.parameters import Params
from jaxspec.models.sharding import in_sections

PARAMS = "params"
SMALLEST_LIMIT_GB = 2


def is_orbax(folder: Path) -> bool:
    return (folder / PARAMS / "_METADATA").is_file()


def orbax_arrays(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path; no weight is read."""
    try:
        with _checkpointer([]) as checkpointer:
            tree = checkpointer.metadata(_absolute(folder)).item_metadata.tree
        arrays: dict[str, Any] = flatten_dict(tree, sep="/")
        return {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in arrays.items()
        }
    except Exception as error:  # Orbax raises nothing more precise
        raise _damaged(folder, error) from error


def check_arrays(
    sources: dict[str, Source], arrays: dict[str, jax.ShapeDtypeStruct], where: str
) -> None:
    """Raises a LoadError that names a missing, misshapen or unknown parameter, or one whose dtype
    is not expected."""
    for path, source in sources.items():
        shape = in_words(arrays[path].shape) if path in arrays else "missing"
        if shape != in_words(source.shape):
            raise LoadError(
                f"{where}: parameter {path} is {shape}, expected {in_words(source.shape)}; "
                "convert the checkpoint again"
            )
        dtypes = [str(NUMPY_DTYPES[name]) for name in source.dtypes]
        if str(arrays[path].dtype) not in dtypes:
            raise LoadError(
                f"{where}: parameter {path} is {arrays[path].dtype}, expected "
                f"{' or '.join(dtypes)}; convert the checkpoint again"
            )
    unknown = sorted(arrays.keys() - sources.keys())
    if unknown:
        raise LoadError(
            f"{where}: unknown parameter {unknown[0]}, expected only those of the config; "
            "convert the checkpoint again"
        )


def restore(
    folder: Path,
    sources: dict[str, Source],
    arrays: dict[str, jax.ShapeDtypeStruct],
    dtype: DTypeLike,
    places: Places | None = None,
) -> Params:
    """The parameters on the default device, or where `places` says for each path. Weights are cast
    to `dtype`, unless their source keeps another; ids stay integers."""
    import orbax.checkpoint as ocp

    device = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    wanted = unflatten_dict(
        {
            path: jax.ShapeDtypeStruct(
                array.shape,
                _wanted(sources[path], array, dtype),
                sharding=places[path].sharding if places else device,
            )
            for path, array in arrays.items()
        },
        sep="/",
    )
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    try:
        with _checkpointer([*arrays.values(), *jax.tree.leaves(wanted)]) as checkpointer:
            params = checkpointer.restore(
                _absolute(folder), ocp.args.PyTreeRestore(item=wanted, restore_args=how)
            )
        _check_finite(folder, params, dtype)
        return params if places is None else in_sections(params, places)
    except LoadError:
        raise
    except Exception as error:  # Orbax raises nothing more precise
        if is_out_of_memory(error):
            raise too_large(sum(map(_num_bytes, arrays.values()))) from error
        if isinstance(error, jax.errors.JaxRuntimeError):  # of the device, not of the folder
            raise
        raise _damaged(folder, error) from error


def _wanted(source: Source, array: jax.ShapeDtypeStruct, dtype: DTypeLike) -> DTypeLike:
    if source.kept_as is not None:
        return source.kept_as
    return dtype if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype


def _check_finite(folder: Path, params: Params, dtype: DTypeLike) -> None:
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    for path, array in flat.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and not is_finite(array):
            count = count_not_finite(np.asarray(array))
            raise not_finite_error(f"{folder}: parameter {path}", count, array.size, dtype)


def _num_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def save(folder: Path, params: Params) -> None:
    import orbax.checkpoint as ocp

    with _checkpointer(jax.tree.leaves(params)) as checkpointer:
        checkpointer.save(_absolute(folder), ocp.args.PyTreeSave(params))


def _checkpointer(arrays: list[Any]) -> Any:
    """Orbax with a limit on the host memory it uses, which must exceed the largest array."""
    import orbax.checkpoint as ocp

    largest = max((_num_bytes(array) for array in arrays), default=0)
    limit = max(SMALLEST_LIMIT_GB, 1 + largest // 10**9)
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=limit,
            restore_concurrent_gb=limit,
            save_device_host_concurrent_gb=limit,
            use_compression=False,
        )
    )


def _absolute(folder: Path) -> Path:
    return (folder / PARAMS).resolve()


def _damaged(folder: Path, error: Exception) -> LoadError:
    return LoadError(
        f"{folder / PARAMS} is not a whole Orbax checkpoint ({one_line(error)}); "
        "convert the source again"
    )
