"""Which rows or columns of the stored tensors each of several devices keeps."""

import numpy as np
from jaxtyping import Shaped

from jaxspec.checkpoint.arranged import PartOfRows, Reordered
from jaxspec.checkpoint.names import Source
from jaxspec.models.sharding import Placement


def is_cut_in_files(source: Source) -> bool:
    """Whether a device's part is some rows or columns of the stored tensors. All other parameters
    are small, and are read as a whole."""
    return not source.spread and (source.arranged is None or isinstance(source.arranged, Reordered))


def parts_of(
    source: Source, place: Placement, index: int, start: int, piece: Shaped[np.ndarray, "piece ..."]
) -> list[Shaped[np.ndarray, "..."]]:
    """The parts of a piece that device `index` keeps. If the parameter's stored tensors are joined
    along their first axis, the piece begins at row `start`."""
    own = own_rows(source, place, index)
    if own is None:
        return _parts_in_order(place, index, source.transposed, start, piece)
    rows = own.stored_rows
    begin, end = np.searchsorted(rows, (start, start + len(piece)))
    return [piece[rows[begin:end] - start]] if begin < end else []


def _parts_in_order(
    place: Placement,
    index: int,
    transposed: bool,
    start: int,
    piece: Shaped[np.ndarray, "piece ..."],
) -> list[Shaped[np.ndarray, "..."]]:
    assert place.dimension is not None, "every device keeps all of it"
    ranges = place.ranges(index)
    if (piece.ndim - 1 - place.dimension if transposed else place.dimension) > 0:
        return [np.concatenate([piece[:, begin:end] for begin, end in ranges], axis=1)]
    within = [(max(begin - start, 0), min(end - start, len(piece))) for begin, end in ranges]
    return [piece[begin:end] for begin, end in within if begin < end]


def own_rows(source: Source, place: Placement, index: int) -> PartOfRows | None:
    """The rows of device `index`; None if they are in the order of the files."""
    if not isinstance(source.arranged, Reordered):
        return None
    return PartOfRows(source.arranged, tuple(place.ranges(index)))
