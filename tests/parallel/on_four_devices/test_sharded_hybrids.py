"""A Qwen3.5 on two and four devices: each has its key heads with their value heads, the states of
these, and the channels of the convolution that they are made of."""

import dataclasses
import functools

import jax
import pytest
from trained_hybrid_pair import PAIR, SMALL, WHOLE, budget, cases, check_case
from wide_models import MIXED, PROMPTS, facts, wide_engine

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened

BUDGETS = [WHOLE, 7, 30, 1, 22, 13]


@functools.cache
def trained_pair() -> Opened:
    return open_models(PAIR / "target", PAIR / "draft", dtype="float32", tensor_parallel_size=2)


def trained_run(**options):
    """The first recorded requests, with budgets of their own: more of them than slots."""
    pair = trained_pair()
    options = {"tensor_parallel_size": 2, "driver": "overlapped", **SMALL, **options}
    engine = Engine.from_models(pair.models, pair.params, **options)
    check_sums(engine)
    asked = cases()[: len(BUDGETS)]
    outputs = engine.generate([case["prompt"] for case in asked], list(map(budget, BUDGETS)))
    assert engine.free_pages == engine.total_pages and repr(engine).count("2 x cpu") == 1
    check_inboxes(engine)
    return list(zip(outputs, asked, BUDGETS, strict=True))


def check_sums(engine: Engine) -> None:
    """Both models say that they add up as the engine was asked to; on a CPU "auto" is psum."""
    said = {use.model: use.runs_on for use in engine.kernels if use.op == "exchange_norm"}
    assert said == dict.fromkeys(("target", "drafter"), asked_of(engine))


def asked_of(engine: Engine) -> str:
    return "psum" if engine.options.exchange == "auto" else engine.options.exchange


def check_inboxes(engine: Engine) -> None:
    """Every sum of a step is counted if it goes through `exchange_norm`."""
    inboxes = engine.loop.device.state.cache.inboxes
    assert (inboxes is None) == (asked_of(engine) == "psum")
    assert inboxes is None or int(inboxes.calls) > 0


def test_tokens_and_acceptance_lengths_of_the_record_if_the_op_adds_up():
    for output, case, most in trained_run(exchange="xla"):
        check_case(output, case, most)


@pytest.mark.parametrize("method", ["none", "dflash+ngram"])
def test_methods(method):
    for output, case, most in trained_run(method=method, driver="lockstep"):
        check_case(output, case, most, lengths=False)


@functools.cache
def on_one_device() -> tuple:
    return tuple(wide_engine(1, "hybrid").generate(PROMPTS, MIXED))


def test_a_mixed_batch_gets_the_same_on_four_devices():
    """Sampled requests too: in float32 a seed gives the same tokens. Here XLA adds up."""
    engine = wide_engine(4, "hybrid", exchange="psum")
    check_sums(engine)
    alone, spread = on_one_device(), engine.generate(PROMPTS, MIXED)
    check_inboxes(engine)
    assert facts(spread) == facts(alone) and not any(one.error for one in alone)
    for one, other in zip(spread[2:], alone[2:], strict=True):
        for told, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert told == pytest.approx(expected, abs=1e-5)


def test_the_widths_of_an_adaptive_engine():
    greedy = (0, 3)
    prompts, params = ([of[i] for i in greedy] for of in (PROMPTS, MIXED))
    params = [dataclasses.replace(one, logprobs=None) for one in params]
    adaptive = wide_engine(4, "hybrid", adaptive=True).generate(prompts, params)
    for output, i in zip(adaptive, greedy, strict=True):
        assert output.token_ids == on_one_device()[i].token_ids and output.error is None


def test_exact_bits_do_not_depend_on_company():
    engine = wide_engine(4, "hybrid", exact=True, batch_sizes=None, prefill_shapes=None)
    asked = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=4)
    [alone] = engine.generate(PROMPTS[3:], asked)
    outputs = engine.generate([*PROMPTS[:2], PROMPTS[3]], [MIXED[0], MIXED[1], asked])
    assert facts(outputs[2:]) == facts([alone])
    assert outputs[2].logprobs == alone.logprobs


def test_every_device_has_its_heads_of_the_states():
    whole, spread = (wide_engine(n, "hybrid").loop.device for n in (1, 4))
    [states, pages], [cut, cut_pages] = (one.state.cache.layers for one in (whole, spread))
    pairs = [(states.matrices, cut.matrices), (states.tails, cut.tails)]
    for all_of_it, parts in [*pairs, (pages.keys, cut_pages.keys)]:
        assert parts.shape == all_of_it.shape
        assert {s.data.size * 4 for s in parts.addressable_shards} == {all_of_it.size}
    heads = {shard.data.shape[1] for shard in cut.matrices.addressable_shards}
    channels = {shard.data.shape[2] for shard in cut.tails.addressable_shards}
    assert heads == {2} and channels == {8 + 8 + 2 * 16}
    small = spread.params["target"]["layers_0"]["delta"]
    assert small["norm"]["scale"].is_fully_replicated
    for name in ("taps", "decay_bias", "log_rate"):
        assert {s.data.size * 4 for s in small[name].addressable_shards} == {small[name].size}
    assert jax.tree.leaves(small["output_norm"])[0].is_fully_replicated
