"""The methods that `docs/methods.md` adds are added, and speculate."""

import pathlib
import re

import pytest
from golden_pair import budget, golden_engine, trajectories

from jaxspec.proposers.methods import METHODS, HostProposer

IN_THE_PACKAGE = dict(METHODS)
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "methods.md"
EXAMPLES = {"pairs": 32, "pairs on device": 42}
"""The methods that the document adds, each with the most lines that it may take."""


@pytest.fixture(params=EXAMPLES)
def documented(request):
    only_those_in_the_package()
    before = set(METHODS)
    for example in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL):
        exec(compile(example, str(DOCUMENT), "exec"), {})
        (added,) = set(METHODS) - before
        assert example.count("\n") <= EXAMPLES[added]
        before = set(METHODS)
    assert before == {*IN_THE_PACKAGE, *EXAMPLES}
    yield request.param
    only_those_in_the_package()


def only_those_in_the_package() -> None:
    """Other tests may have run the examples too."""
    METHODS.clear()
    METHODS.update(IN_THE_PACKAGE)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_it_runs(documented, driver):
    engine = golden_engine(method=documented, driver=driver)
    cases = trajectories()[1:6]
    prompts = [[7, 30, 201, 9] * 8, *(case["prompt"] for case in cases)]
    outputs = engine.generate(prompts, budget(30))
    for output, case in zip(outputs[1:], cases):
        assert list(output.token_ids) == case["greedy"][:30]
    assert outputs[0].stats.num_accepted_draft_tokens > 0
    proposer = engine.loop.drafters.proposer
    if documented == "pairs":
        assert isinstance(proposer, HostProposer)
        assert not proposer.newest, "all were released"
    else:
        assert proposer is None, "nothing is proposed on the host"


def test_every_method_is_listed():
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in IN_THE_PACKAGE)
