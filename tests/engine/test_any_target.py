"""The engine runs a target that is not Qwen3, whose layers remember one state per slot."""

import pytest
from first_right import NAME, propose_right

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from models.toy_recurrent import ToyRecurrent

TARGET = ToyRecurrent(vocab_size=8, hidden=8)
PARAMS = TARGET.random_params()
PROMPTS = [[3, 1, 4, 1, 5], [0, 2, 6], [5, 3, 5, 1, 2, 7, 2, 3, 2], [3, 7, 4], [6, 2, 6, 4, 3, 3]]
BUDGET = SamplingParams(max_tokens=40)


def generate(method: str, **options) -> list:
    sizes = {"max_batch": 2, "max_model_len": 64, "page_size": 8, "prefill_chunk": 4}
    models, params = Models(TARGET), {"target": PARAMS}
    engine = Engine.from_models(models, params, method=method, **sizes, **options)
    return engine.generate(PROMPTS, BUDGET)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_lookup_gives_the_tokens_of_plain_decoding(driver):
    plain = generate("none", driver="lockstep")
    found = generate("ngram", driver=driver, num_drafts=3)
    assert not any(output.error for output in found)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    accepted = [output.stats.num_accepted_draft_tokens for output in found]
    assert all(accepted), "a request without accepted drafts has tried nothing"


def test_a_prefix_cache_is_not_made_if_states_cannot_be_copied(caplog):
    caplog.set_level("INFO", "jaxspec")
    outputs = generate("none")
    assert "keep something per request and cannot copy it" in caplog.text
    assert {output.stats.cached_tokens for output in outputs} == {0}


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_every_acceptance_length_gives_the_tokens_of_plain_decoding(driver, right, monkeypatch):
    """What a step does not accept is rolled back by replaying what it does."""
    plain = generate("none", driver="lockstep")
    propose_right(monkeypatch, plain, right, vocab_size=8)
    outputs = generate(NAME, driver=driver, num_drafts=4)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    for output in outputs:
        *lengths, _, _ = output.stats.acceptance_lengths
        assert set(lengths) == {right + 1}
