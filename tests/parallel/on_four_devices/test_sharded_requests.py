"""Whatever a request asks for, it gets the same on one, two and four devices."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from wide_models import GREEDY, MIXED, PROMPTS, facts, wide_engine

from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup import pools
from jaxspec.engine.setup.ahead import NAME
from jaxspec.engine.step import compiled
from jaxspec.engine.step.device import Device
from jaxspec.models.parameters import num_bytes
from jaxspec.models.sharding import on_one_device

DEVICES = {"dflash": 4, "eagle3": 2}


def logprobs_of(output) -> list[tuple[int, float]]:
    each = [*(output.logprobs or []), *(one for one in output.prompt_logprobs or [] if one)]
    return [pair for one in each for pair in sorted(one.items())]


def close(output, expected) -> bool:
    pairs = list(zip(logprobs_of(output), logprobs_of(expected), strict=True))
    return bool(pairs) and all(
        a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-5) for a, b in pairs
    )


@pytest.mark.parametrize("kind", DEVICES)
def test_a_mixed_batch_gets_the_same_on_any_number_of_devices(kind):
    """Sampled requests too: in float32 a seed gives the same tokens."""
    alone = wide_engine(1, kind).generate(PROMPTS, MIXED)
    spread = wide_engine(DEVICES[kind], kind).generate(PROMPTS, MIXED)
    assert facts(spread) == facts(alone)
    for one, other in zip(spread[2:], alone[2:]):
        assert len(one.logprobs) == len(one.token_ids) and close(one, other)
    assert sum(len(one.token_ids) for one in alone) == 57 and len({*alone[1].token_ids}) > 5


def test_prompts_are_scored():
    scores = SamplingParams(max_tokens=0, prompt_logprobs=2)
    [alone], [spread] = (
        wide_engine(n, method="none").generate(PROMPTS[1:2], scores) for n in (1, 4)
    )
    assert len(spread.prompt_logprobs) == len(PROMPTS[1]) and close(spread, alone)


def test_steps_that_share_out_their_tokens():
    adaptive = wide_engine(4, adaptive=True).generate(PROMPTS, GREEDY)
    plain = wide_engine(1, method="none").generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in adaptive] == [one.token_ids for one in plain]
    assert not any(one.error for one in adaptive)


def test_what_every_step_reads_lies_on_every_device():
    """Otherwise each step would copy it to the others."""
    engine = wide_engine(4, synthetic_acceptance=3.0)
    device = engine.loop.device
    lies_everywhere(device)
    engine.set_synthetic_acceptance(from_length(2.0, 7))
    lies_everywhere(device)


def lies_everywhere(device: Device) -> None:
    read = [*jax.tree.leaves((device.params, device.state)), device.integers((0,), (1,), 0)]
    assert {len(array.devices()) for array in read} == {4}


def test_memory_is_divided():
    """Each device has a quarter of pages and matrices, and all of what is small."""
    whole, spread = wide_engine(1).loop.device, wide_engine(4).loop.device
    pages = [jax.tree.leaves(one.state.cache)[0] for one in (whole, spread)]
    assert pages[0].shape == pages[1].shape
    assert {shard.data.nbytes * 4 for shard in pages[1].addressable_shards} == {pages[0].nbytes}
    layer = spread.params["target"]["layers_0"]
    for name, parts in {"attention": ("qkv", "out"), "mlp": ("gate_up", "down")}.items():
        for part in parts:
            kernel = layer[name][part]["kernel"]
            assert {s.data.size * 4 for s in kernel.addressable_shards} == {kernel.size}
        scale = layer[name]["norm"]["scale"]
        assert {shard.data.size for shard in scale.addressable_shards} == {scale.size}


@pytest.mark.parametrize("kind", ["dflash", "hybrid"])
def test_pages_are_planned_for_what_each_device_keeps(kind, monkeypatch):
    """A page takes half as much on each of two devices, so there are twice as many."""
    free = 700_000
    monkeypatch.setattr(pools.memory, "free_bytes", lambda share, devices: free)
    monkeypatch.setattr(pools, "_temporary_bytes", lambda *_: 0)
    for devices in (1, 2):
        engine = wide_engine(devices, kind, max_model_len=1000, prefill_chunk=32)
        state = on_one_device(engine.loop.device.state)
        pages = [p for p in jax.tree.leaves(state) if p.shape[:2] == (engine.total_pages + 1, 16)]
        per_page = sum(p.size * 4 for p in pages) / (engine.total_pages + 1)
        left = free - num_bytes(state)
        assert 0 <= left < per_page


@pytest.mark.parametrize("kind", ["dflash", "hybrid"])
def test_a_prompt_that_began_alike_is_found(kind):
    text = [int(token) for token in np.random.default_rng(0).integers(0, 512, 60)]
    engine, plain = wide_engine(4, kind), wide_engine(1, kind)
    engine.generate([text], GREEDY)
    [again] = engine.generate([text[:50] + [1, 2]], GREEDY)
    [expected] = plain.generate([text[:50] + [1, 2]], GREEDY)
    assert again.stats.cached_tokens == 48 and expected.stats.cached_tokens == 0
    assert facts([again]) == facts([expected])


def test_exact_bits_do_not_depend_on_company():
    """Four partial sums have an order, which must not follow the place in the batch."""
    engine = wide_engine(4, exact=True, batch_sizes=None, prefill_shapes=None)
    asked = dataclasses.replace(GREEDY, logprobs=4)
    [alone] = engine.generate(PROMPTS[3:], asked)
    engine.reset_prefix_cache()
    outputs = engine.generate([*PROMPTS[:2], PROMPTS[3]], [MIXED[0], MIXED[1], asked])
    assert facts(outputs[2:]) == facts([alone])
    assert outputs[2].logprobs == alone.logprobs


def test_after_a_lost_state_requests_go_on():
    engine = wide_engine(4)
    expected = facts(engine.generate(PROMPTS[:2], MIXED[:2]))
    stream = engine.stream(PROMPTS[:2], MIXED[:2])
    next(stream)
    engine.loop.trusted = False
    outputs = {event.index: event.output for event in stream if event.output is not None}
    tokens = [list(outputs[i].token_ids) for i in range(2)]
    assert tokens[0] == list(expected[0][0]) and len(tokens[1]) == MIXED[1].max_tokens


@pytest.mark.usefixtures("compiles_anew")
def test_kept_programs_are_those_of_the_number_of_devices(tmp_path, monkeypatch):
    """A second process compiles nothing, unless it has another number of devices."""
    made, lower = [], jax.stages.Traced.lower
    note = lambda traced: (made.append(traced.fun_name), lower(traced))[1]
    monkeypatch.setattr(jax.stages.Traced, "lower", note)
    counts, tokens = [], []
    for devices in (2, 2, 1):
        compiled._SHARED.clear()
        engine = wide_engine(devices, cache_dir=str(tmp_path), method="none")
        tokens.append(engine.generate(PROMPTS[0], GREEDY).token_ids)
        counts.append(len(made))
    compiled._SHARED.clear()
    assert counts == [4, 4, 8], made
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.usefixtures("compiles_anew")
def test_programs_for_several_devices_are_made_ahead(monkeypatch):
    monkeypatch.setattr(compiled, "_SHARED", {})
    options = dict(method="none", cache_dir=False, compile_ahead=True)
    engine = wide_engine(2, **options)
    tokens = engine.generate(PROMPTS[0], GREEDY).token_ids
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join()
    programs = [*engine.programs(draws=False), *engine.programs(draws=True)]
    assert len(programs) > 4 and all(program.is_ready for program in programs)
    waits = engine.loop.device.clock.waits.count
    assert engine.generate(PROMPTS, GREEDY)[0].token_ids == tokens
    assert engine.loop.device.clock.waits.count == waits
