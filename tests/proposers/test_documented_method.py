"""The host proposer that `docs/methods.md` adds is added, and speculates."""

import pathlib
import re

import pytest
from golden_pair import budget, golden_engine, trajectories

from jaxspec.proposers.methods import METHODS, HostProposer

IN_THE_PACKAGE = dict(METHODS)
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.fixture
def documented():
    _, section = DOCUMENT.read_text().split("\n## A host proposer of your own\n")
    (example,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], flags=re.DOTALL)
    assert example.count("\n") <= 32
    only_those_in_the_package()
    exec(compile(example, str(DOCUMENT), "exec"), {})
    (name,) = set(METHODS) - set(IN_THE_PACKAGE)
    yield name
    only_those_in_the_package()


def only_those_in_the_package() -> None:
    """Other tests may have run the example too."""
    METHODS.clear()
    METHODS.update(IN_THE_PACKAGE)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_it_runs(documented, driver):
    engine = golden_engine(method=documented, driver=driver)
    assert isinstance(engine.loop.proposer, HostProposer)
    cases = trajectories()[1:6]
    prompts = [[7, 30, 201, 9] * 8, *(case["prompt"] for case in cases)]
    outputs = engine.generate(prompts, budget(30))
    for output, case in zip(outputs[1:], cases):
        assert list(output.token_ids) == case["greedy"][:30]
    assert outputs[0].stats.num_accepted_draft_tokens > 0
    assert not engine.loop.proposer.newest, "all were released"


def test_every_method_is_told_of():
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in IN_THE_PACKAGE)
