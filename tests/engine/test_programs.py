"""What is compiled: everything before it is needed; every program writes the pools in place."""

import _thread
import contextlib
import threading
import time

import jax
import numpy as np
import pytest
from watching import watch

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.warmup import COMPILERS, compile_side_by_side
from jaxspec.engine.step.io import Models
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer

VOCAB = 24
LAYOUTS = {
    "overlapped": dict(driver="overlapped", max_batch=2, prefill_chunk=6),
    "exact": dict(driver="overlapped", max_batch=2, prefill_chunk=5, exact=True),
    "lockstep": dict(driver="lockstep", max_batch=1, prefill_chunk=4),
    "plain": dict(driver="overlapped", max_batch=1, prefill_chunk=7, method="none"),
    "ngram": dict(driver="overlapped", max_batch=1, prefill_chunk=7, method="ngram"),
    "ngram, lockstep": dict(driver="lockstep", max_batch=1, prefill_chunk=7, method="ngram"),
    "both": dict(
        driver="overlapped", max_batch=1, prefill_chunk=8, method="dflash+ngram", max_ngram=1
    ),
    "adaptive": dict(driver="overlapped", max_batch=1, prefill_chunk=9, adaptive=True),
}


@pytest.fixture(scope="module")
def tiny_pair() -> tuple[Models, dict]:
    decoder = Decoder(8, 8, 1, 2, 1, 4, 1e-6, Rope(theta=1e4), 256)
    target = Qwen3(Qwen3Config(decoder, VOCAB, True), capture=(0,))
    drafter = DFlash(DFlashConfig(decoder, 3, VOCAB - 1, (0,), VOCAB, (BlockMask(causal=False),)))
    params = {
        "target": random_params(target, jax.random.key(0)),
        "drafter": random_params(drafter, jax.random.key(1)),
    }
    return Models(target, (DFlashProposer(drafter),)), params


def tiny_engine(pair, layout: str) -> Engine:
    options = {"max_model_len": 60, "page_size": 4, **LAYOUTS[layout]}
    return Engine.from_models(*pair, **options)


@contextlib.contextmanager
def compilations():
    """Names of the programs that are compiled meanwhile."""
    names = []

    def listen(event, seconds, **tags):
        if "backend_compile" in event:
            names.append(tags.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def mixed_run(engine: Engine) -> None:
    """Prompts of all lengths come and go, some draw, one is left."""
    random = np.random.default_rng(0)
    prompt = lambda: random.integers(0, VOCAB - 1, random.integers(1, 20)).tolist()
    params = lambda i: SamplingParams(
        max_tokens=int(random.integers(1, 16)),
        temperature=0.7 * (i % 2),
        logprobs=2 if i % 3 == 0 else None,
    )
    leave = engine.stream([prompt() for _ in range(2)], SamplingParams(max_tokens=20))
    next(leave)
    outputs = engine.generate([prompt() for _ in range(9)], [params(i) for i in range(9)])
    leave.close()
    outputs += engine.generate([prompt() for _ in range(3)], SamplingParams(max_tokens=7))
    assert all(output.error is None for output in outputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_warm_up_a_mixed_run_compiles_nothing(tiny_pair, layout):
    engine = tiny_engine(tiny_pair, layout)
    programs = {}
    for draws in (False, True):
        for program in engine.programs(draws=draws):
            shapes = jax.tree.map(lambda x: x.shape, program.inputs)
            key = (program.name, str(shapes), str(program.static))
            programs[key] = programs.get(key) or program.lowered.compile()
    with compilations() as compiled:
        jax.jit(lambda x: x + len(layout)).lower(np.float32(1)).compile()
        assert len(compiled) == 1, "the listener hears nothing"
        compiled.clear()
        mixed_run(engine)
    assert compiled == []
    state = jax.tree.map(lambda x: x.nbytes, engine.loop.device.state)
    pools = sum(jax.tree.leaves([state.cache, state.proposers]))
    writers = {"prefill_step", "decode_step", "verify_step", "draft_step"}
    assert writers & {step for step, _, _ in programs}
    for (step, _, _), program in programs.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= pools, f"{step} does not write the pools in place"


def test_mixed_steps_run_once_all_programs_are_ready_and_first_steps_do_without(tiny_pair):
    """Prompts that come while others decode are read beside them, and nothing is compiled then."""
    sizes = dict(max_model_len=60, page_size=4, max_batch=4, batch_sizes=(4,))
    shapes = dict(prefill_chunk=6, prefill_shapes=((1, 6),), prefill_beside_decoding=6)
    engine = Engine.from_models(*tiny_pair, driver="overlapped", **sizes, **shapes)
    for draws in (False, True):
        mixed = [one for one in engine.programs(draws) if one.name == "mixed_step"]
        assert [(len(one.inputs[2].integers), one.inputs[2].width) for one in mixed] == [(1, 6)]
    prompts = [[1, 2, 3], [4] * 20, [5] * 9]
    assert engine.warm_up(prompts, THIRTY) == engine.warm_up(prompts, sampling_params=THIRTY)
    assert read_in_turn(engine, prompts).count("mixed_step") == 0
    assert not any(one.is_ready for one in engine.programs(False) if one.name == "mixed_step")
    engine.warm_up()
    with compilations() as compiled:
        assert read_in_turn(engine, prompts).count("mixed_step") > 4
    assert compiled == []


THIRTY = SamplingParams(max_tokens=30, ignore_eos=True)


def read_in_turn(engine: Engine, prompts: list[list[int]]) -> list[str]:
    """What runs while these prompts come, each when the one before it decodes."""
    watcher, ids, ended = watch(engine), [], set()
    engine.reset_prefix_cache()
    while len(ended) < len(prompts):
        if len(ids) < len(prompts):
            ids.append(engine.submit(prompts[len(ids)], THIRTY))
        for _ in range(3):
            ended |= {event.index for event in engine.step(ids) if event.output}
    engine.loop.device.observers.remove(watcher)
    return watcher.ran


def test_nothing_is_compiled_any_more_once_interrupted():
    """Whatever is compiled when the interpreter ends aborts the process."""
    events = []

    class Slow:
        prepare = lambda self: None

        def make(self):
            events.append("begun")
            time.sleep(0.5)
            events.append("done")

    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        compile_side_by_side(Slow() for _ in range(3 * COMPILERS))
    assert events.count("begun") == events.count("done") <= COMPILERS
