"""The example of docs/kernels.md runs as it stands."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    assert scope["attended"].shape == (2, 8, 8, 64)
