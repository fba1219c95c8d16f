"""Both drivers give the same outputs, whatever comes and when."""

import functools

from golden_pair import golden_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.requests.sampling_params import SamplingParams

engine_with = functools.cache(lambda driver: golden_engine(driver=driver))

params = st.fixed_dictionaries(
    dict(
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        top_k=st.sampled_from([0, 20]),
        seed=st.integers(0, 9),
        stop_token_ids=st.lists(st.integers(1, 511), max_size=40),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, 2]),
    )
)
prompt = st.lists(st.integers(4, 511), min_size=1, max_size=70)
arrivals = st.lists(st.tuples(prompt, params, st.integers(0, 12)), min_size=1, max_size=7)


def outputs_of(driver: str, arrivals: list) -> list:
    """Each request is submitted once the loop has made so many steps."""
    engine, streams = engine_with(driver), {}
    for step in range(13):
        for i, (prompt, params, at) in enumerate(arrivals):
            if at == step:
                streams[i] = engine.stream(prompt, SamplingParams(**params))
        engine.loop.step()
    outputs = [[e.output for e in streams[i]][-1] for i in range(len(arrivals))]
    assert engine.free_pages == engine.total_pages
    return outputs


@settings(max_examples=12, deadline=None)
@given(arrivals)
def test_lockstep_and_overlapped_agree(arrivals):
    for one, other in zip(outputs_of("lockstep", arrivals), outputs_of("overlapped", arrivals)):
        assert one.error is None and one.token_ids == other.token_ids
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.stats.acceptance_lengths == other.stats.acceptance_lengths
        assert one.stats.num_draft_tokens == other.stats.num_draft_tokens
        assert [list(x) for x in one.logprobs or ()] == [list(x) for x in other.logprobs or ()]
