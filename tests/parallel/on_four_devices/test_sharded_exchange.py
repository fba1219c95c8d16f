"""Engines whose devices add up by `exchange_norm`, through its reference: the same tokens."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from golden_pair import GOLDENS, budget, check_golden, golden_engine, trajectories

from jaxspec import RequestFailed, UsageError, bench, generate
from jaxspec.cache.cache import Cache
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine
from pallas_kernels.exchange import reference

BUDGETS = [48, 5, 29]


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all exchanges of programs that are traced."""
    seen: list[tuple[int, ...]] = []
    whole = reference.exchange_norm

    def noted(x, *arguments, **options):
        seen.append(x.shape)
        return whole(x, *arguments, **options)

    monkeypatch.setitem(reference_of(), "xla", noted)
    return seen


def reference_of() -> dict:
    from pallas_kernels.exchange.api import EXCHANGE_NORM

    return EXCHANGE_NORM.implementations  # pyright: ignore[reportReturnType]


def caches(engine) -> list[Cache]:
    state = engine.loop.device.state
    return [part for part in (state.cache, *state.proposers) if isinstance(part, Cache)]


@pytest.mark.parametrize("which", ["a", "dspark", "eagle3"])
def test_the_tokens_are_those_of_the_goldens(which, exchanged):
    engine = golden_engine(which, tensor_parallel_size=2, exchange="xla", cache_dir=False)
    cases = trajectories(which)[: len(BUDGETS)]
    outputs = engine.generate(
        [case["prompt"] for case in cases], [budget(most) for most in BUDGETS]
    )
    for output, case, most in zip(outputs, cases, BUDGETS):
        check_golden(output, case, most)
    assert exchanged, "no sum went through the op"
    of_target, *of_drafter = caches(engine)
    assert len(of_drafter) == (which != "eagle3")
    for cache in (of_target, *of_drafter):
        inboxes = cache.inboxes
        assert inboxes is not None and inboxes.addresses.shape == (2, 2)
        assert int(inboxes.calls) >= 2 * len(cache.layers), "calls are counted through all steps"
        assert not np.asarray(inboxes.late).any()
        assert len({shard.device for shard in inboxes.device.addressable_shards}) == 2


def test_more_tokens_than_the_inboxes_hold_are_left_to_xla_and_the_log_says_so(exchanged, caplog):
    """The first step reads 5 x 128 tokens, and the next ones one block of each request."""
    # Of a batch size that no other test has, because engines share programs.
    sizes = dict(max_batch=5, batch_sizes=(5,), prefill_chunk=128, prefill_shapes=((5, 128),))
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        engine = golden_engine(
            "a", tensor_parallel_size=2, exchange="xla", cache_dir=False, **sizes
        )
    wanted = "but exchange_norm xla (xla was asked for) and psum (target: more than 512 tokens per "
    assert wanted in caplog.text
    said = [use for use in engine.stats().kernels if use.op == "exchange_norm"]
    assert [use.sizes for use in said if use.runs_on == "psum"] == [((5, 128),)]
    case = trajectories("a")[0]
    [output] = engine.generate([case["prompt"]], [budget(9)])
    check_golden(output, case, 9)
    assert exchanged and all(batch * width <= 512 for batch, width, _ in exchanged)


def test_the_commands_choose_it_and_write_down_what_it_runs_on(tmp_path, capsys):
    models = [f"--model={GOLDENS}/a/target", f"--draft-model={GOLDENS}/a/draft", "--no-cache"]
    chosen = [*models, "--dtype=float32", "--tensor-parallel-size=2", "--exchange=xla"]
    assert generate.main([*chosen, "--prompt-ids=1,2,3", "--max-tokens=3"]) == 0
    assert "expected a Hopper GPU), but exchange_norm xla (xla was asked for)" in (
        capsys.readouterr().err
    )
    small = (
        "--methods=dflash --concurrency=2 --num-prompts=2 --input-len=9 --output-len=9 --passes=1"
    )
    small += " --ignore-eos --no-chat-template --page-size=16 --prefill-chunk=16"
    written = tmp_path / "bench.json"
    assert bench.main([*chosen, *small.split(), f"--json={written}"]) == 0
    assert "exchange_norm xla (xla was asked for)" in capsys.readouterr().err
    result = json.loads(written.read_text())
    uses = [use for use in result["kernels"]["dflash"] if use["op"] == "exchange_norm"]
    said = [(use["model"], use["runs_on"], use["reason"]) for use in uses]
    assert said == [(model, "xla", "xla was asked for") for model in ("target", "drafter")]


def test_by_default_xla_adds_up(exchanged):
    engine = golden_engine("a", tensor_parallel_size=2, cache_dir=False)
    engine.generate([trajectories("a")[0]["prompt"]], [budget(5)])
    assert not exchanged and all(cache.inboxes is None for cache in caches(engine))


def test_on_one_device_nothing_is_exchanged(exchanged):
    engine = golden_engine("a", exchange="xla", cache_dir=False)
    case = trajectories("a")[0]
    [output] = engine.generate([case["prompt"]], [budget(20)])
    check_golden(output, case, 20)
    assert not exchanged


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_a_device_that_another_one_has_waited_for_in_vain_ends_all_requests(monkeypatch, driver):
    """As the kernel does it: numbers of whoever was late are NaN."""
    whole = reference.exchange_norm

    def with_lateness(x, part, scale, inboxes, **options):
        total, normed, after = whole(x, part, scale, inboxes, **options)
        missing = jnp.where(inboxes.late.any(), jnp.nan, 0.0).astype(x.dtype)
        return total + missing, normed + missing, after

    monkeypatch.setitem(reference_of(), "xla", with_lateness)
    # Of a batch size that no other test has, because engines share programs.
    house = dict(max_batch=3, batch_sizes=(3,), cache_dir=False, driver=driver)
    engine = golden_engine("a", tensor_parallel_size=2, exchange="xla", **house)
    prompts = [case["prompt"] for case in trajectories("a")[:2]]
    assert all(output.error is None for output in engine.generate(prompts, budget(4)))
    device = engine.loop.device
    inboxes = device.state.cache.inboxes
    late = dataclasses.replace(inboxes, late=inboxes.late.at[130].set(1))
    cache = dataclasses.replace(device.state.cache, inboxes=late)
    device.state = dataclasses.replace(device.state, cache=cache)
    with pytest.raises(RequestFailed, match="2 of 2 .* device 0 sent nothing .* within 10 s"):
        engine.generate(prompts, budget(4))


def test_another_name_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    said = "exchange is 'nccl'; expected one of auto, psum, xla, mosaic"
    with pytest.raises(UsageError, match=said):
        golden_engine("a", tensor_parallel_size=2, exchange="nccl")


def test_kernels_need_a_gpu():
    with pytest.raises(UsageError, match="exchange is 'mosaic', but the device is a CPU"):
        golden_engine("a", tensor_parallel_size=2, exchange="mosaic")


def test_one_process_is_needed(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UsageError, match="exchange is 'xla', but 2 processes run together"):
        plan_engine(golden_engine("a").loop.device.models, EngineOptions(exchange="xla"))


def test_there_are_four_devices():
    assert jax.local_device_count() == 4
