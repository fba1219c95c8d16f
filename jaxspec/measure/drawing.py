"""Shared parts of pictures: the library, files, colours, axes. Needs the extra `plot`.

This module does not import jax: a command checks whether it can draw before jax starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.console.files import check_writable
from jaxspec.errors import LoadError, UsageError

COLOURS = ("#3b6fb6", "#d1682c", "#3f8f5b", "#8a5fb0", "#7a7a7a")
GREY = "#9a9a9a"


def pyplot() -> Any:
    """matplotlib, set up to draw into files. If it is missing, the error names the extra to
    install."""
    try:
        import matplotlib
    except ImportError as error:
        raise LoadError(
            "plots need matplotlib; install it with pip install 'jaxspec-decode[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "figure.dpi": 120,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e4e4e4",
            "axes.axisbelow": True,
            "legend.frameon": False,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
        }
    )
    return pyplot


def check_plot(path: str | None) -> None:
    """Refuses a path to which no picture can be drawn: checks matplotlib, the folder and the
    suffix."""
    if path is None:
        return
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix[1:].lower()
    if suffix and suffix not in known:
        raise UsageError(f"plot {path}: no pictures of type {suffix!r}; expected .png, .svg, .pdf")
    check_writable(path)


def save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"plot {path} cannot be written: {error}") from error


def from_zero(axes: Any, room: float) -> None:
    """Sets the y axis from 0 to `room` times its upper limit, to leave space for a legend."""
    axes.set_ylim(0, axes.get_ylim()[1] * room)


def concurrency_axis(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    axes.set_xlabel("concurrent requests")
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
