"""Prompts in vLLM's form through the engine: the same tokens as the plain ones."""

import pytest
from fake_device import fake_engine
from golden_pair import budget

from jaxspec.errors import UsageError


def test_a_mapping_is_one_prompt_and_continues_its_ids_not_its_keys():
    plain = fake_engine().generate([1, 2, 3], budget(4))
    one = fake_engine().generate({"prompt_token_ids": [1, 2, 3]}, budget(4))
    assert one.token_ids == plain.token_ids and len(plain.token_ids) == 4
    engine = fake_engine()
    several = engine.generate([{"prompt_token_ids": [1, 2, 3]}, [1, 2, 3]], budget(4))
    assert [one.token_ids for one in several] == [plain.token_ids] * 2
    id = engine.submit({"prompt_token_ids": [1, 2, 3]}, budget(1))
    events = []
    while not any(event.output for event in events):
        events += engine.step([id])
    assert events[-1].output.token_ids == plain.token_ids[:1]


@pytest.mark.parametrize(
    "prompts", [{"a": 1}, [[1], {"prompt_token_ids": [1], "prompt": "a"}], {3, 1}, [True]]
)
def test_what_is_refused_leaves_the_engine_idle(prompts, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users run
    engine = fake_engine()
    for call in engine.generate, engine.stream:
        with pytest.raises(UsageError):
            call(prompts, budget(4))
    assert engine.loop.idle
