"""Engines whose decode steps also read prompts, and requests that come while others decode."""

from golden_pair import golden_engine
from watching import watch

from jaxspec.engine.engine import Engine


def always_ready(engine: Engine) -> Engine:
    """Makes mixed steps run without `warm_up`, which would compile all programs first."""
    engine.loop.device.has = lambda *_, **__: True
    return engine


def mixed_engine(which: str = "a", tokens: int = 16, **options) -> Engine:
    return always_ready(golden_engine(which, prefill_beside_decoding=tokens, **options))


def staggered(engine: Engine, prompts, params, pause: int = 2) -> tuple[list, int]:
    """Submits each request some steps after the one before it, if a slot will stay free. Returns
    the outputs, and how many steps were mixed."""
    watcher, ids, outputs = watch(engine), [], {}
    while len(outputs) < len(prompts):
        if len(ids) < len(prompts) and len(ids) - len(outputs) < engine.plan.num_slots - 1:
            ids.append(engine.submit(prompts[len(ids)], params[len(ids)]))
        for _ in range(pause):
            for event in engine.step(ids):
                if event.output is not None:
                    outputs[event.index] = event.output
    engine.loop.device.observers.remove(watcher)
    assert engine.free_pages == engine.total_pages
    return [outputs[id] for id in ids], watcher.ran.count("mixed_step")
