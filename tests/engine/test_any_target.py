"""The engine runs a target that is not Qwen3, whose layers remember one state per slot."""

import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from jaxspec.proposers.methods import METHODS, Method
from models.toy_recurrent import ToyRecurrent

TARGET = ToyRecurrent(vocab_size=8, hidden=8)
PARAMS = TARGET.random_params()
PROMPTS = [[3, 1, 4, 1, 5], [0, 2, 6], [5, 3, 5, 1, 2, 7, 2, 3, 2], [3, 7, 4], [6, 2, 6, 4, 3, 3]]
BUDGET = SamplingParams(max_tokens=40)


class FirstRight:
    """Proposes what plain decoding emitted, with the first `right` tokens as they were and a wrong
    one after them."""

    def __init__(self, known: dict[tuple[int, ...], tuple[int, ...]], right: int):
        self.known, self.right = known, right
        self.tokens: dict[int, list[int]] = {}

    def commit(self, request, tokens, num_drafts=0, accepted=0):
        self.tokens.setdefault(request, []).extend(tokens)

    def propose(self, request, room):
        tokens = tuple(self.tokens[request])
        [prompt] = [p for p in self.known if tokens[: len(p)] == p]
        right = [*prompt, *self.known[prompt]][len(tokens) :][: self.right]
        wrong = (([*prompt, *self.known[prompt], 0][len(tokens) + len(right)]) + 1) % 8
        return [*right, wrong][:room]

    def release(self, request):
        self.tokens.pop(request, None)


def generate(method: str, **options) -> list:
    sizes = {"max_batch": 2, "max_model_len": 64, "page_size": 8, "prefill_chunk": 4}
    models, params = Models(TARGET), {"target": PARAMS}
    engine = Engine.from_models(models, params, method=method, **sizes, **options)
    return engine.generate(PROMPTS, BUDGET)


# A block that was written and not yet committed goes into the commit and does not come out of it.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_lookup_gives_the_tokens_of_plain_decoding(driver):
    plain = generate("none", driver="lockstep")
    found = generate("ngram", driver=driver, num_drafts=3)
    assert not any(output.error for output in found)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    accepted = [output.stats.num_accepted_draft_tokens for output in found]
    assert all(accepted), "a request without accepted drafts has tried nothing"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_every_acceptance_length_gives_the_tokens_of_plain_decoding(driver, right, monkeypatch):
    """What a step does not accept is rolled back by replaying what it does."""
    plain = generate("none", driver="lockstep")
    known = {tuple(output.prompt_token_ids): output.token_ids for output in plain}
    method = Method(host=lambda options: FirstRight(known, right))
    monkeypatch.setitem(METHODS, "first right", method)
    outputs = generate("first right", driver=driver, num_drafts=4)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    for output in outputs:
        *lengths, _, _ = output.stats.acceptance_lengths
        assert set(lengths) == {right + 1}
