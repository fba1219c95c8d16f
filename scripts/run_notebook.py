"""Runs the cells of a notebook and stores in it what they print, return and draw.

    python scripts/run_notebook.py examples/tour.ipynb

A notebook is a JSON file, so this needs no Jupyter. Cells run in order in one process, without
magics. The file also gets a hash of what ran, with which a test finds outputs that are stale.
"""

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxspec

RAN = "outputs_of"
"""Key in the notebook's metadata, for the hash of the cells and models that gave the outputs."""


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells. An exception in a cell passes through."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count, cells = 0, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = list(_outputs("".join(cell["source"]), names, count))
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    metadata = notebook["metadata"] | {RAN: hash_of(notebook)}
    return notebook | {"cells": cells, "metadata": metadata}


def hash_of(notebook: dict[str, Any]) -> str:
    """A hash of the code of a notebook and of the models in the package."""
    digest = hashlib.sha256()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            digest.update("".join(cell["source"]).encode() + b"\0")
    for folder in jaxspec.demo_pair():
        digest.update((Path(folder) / "model.safetensors").read_bytes())
    return digest.hexdigest()


def _outputs(source: str, names: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """What one cell prints, then its drawings, then the value of its last expression."""
    tree, last = ast.parse(source), None
    if tree.body and isinstance(end := tree.body[-1], ast.Expr):
        tree.body.pop()
        last = ast.Expression(end.value)
    file, printed, value = f"cell {count}", io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if last is not None:
            value = eval(compile(last, file, "eval"), names)
    if text := printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
    for picture in _drawings():
        data = {"image/png": picture, "text/plain": ["<Figure>"]}
        yield {"data": data, "metadata": {}, "output_type": "display_data"}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        result = {"data": data, "execution_count": count, "metadata": {}}
        yield result | {"output_type": "execute_result"}


def _drawings() -> Iterator[str]:
    """Every open figure as a PNG file in base64. Closes the figures."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        figure, file = pyplot.figure(number), io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")
        pyplot.close(figure)
        yield base64.b64encode(file.getvalue()).decode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args(argv).notebook
    os.environ["MPLBACKEND"] = "Agg"  # draws into files, without a window
    ran = run(json.loads(path.read_text()))
    path.write_text(json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
