"""Several threads on one engine: everyone gets its own tokens, and nobody waits for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_device import continuation, fake_engine
from golden_pair import budget, golden_engine, trajectories
from sweeping import check_nothing_is_leaked

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.turn import Turn
from jaxspec.errors import UsageError

THREADS, ROUNDS = 6, 5
PATIENCE_S = 300
"""For a machine that is busy with other things; a thread that waits for ever waits longer."""


def prompt_of(thread: int, number: int) -> list[int]:
    return [1 + thread, 2 + number, 3, *range(4, 4 + (thread * number) % 9)]


def generates(engine, thread):
    for number in range(ROUNDS):
        prompts = [prompt_of(thread, number), prompt_of(thread, number + 1)]
        for prompt, output in zip(prompts, engine.generate(prompts, budget(9))):
            assert list(output.token_ids) == continuation(prompt, 9, True) and not output.error


def streams(engine, thread):
    for number in range(ROUNDS):
        prompt, tokens = prompt_of(thread, number), []
        for event in engine.stream(prompt, budget(11)):
            tokens.extend(event.token_ids)
        assert tokens == continuation(prompt, 11, True)


def steps(engine, thread):
    for number in range(ROUNDS):
        prompt, tokens, output = prompt_of(thread, number), [], None
        id = engine.submit(prompt, budget(7))
        while output is None:
            for event in engine.step([id]):
                tokens.extend(event.token_ids)
                output = event.output
        assert tokens == list(output.token_ids) == continuation(prompt, 7, True)


def leaves(engine, thread):
    """Aborts, closes and deletes streams, and looks at statistics."""
    for number in range(ROUNDS):
        id = engine.submit(prompt_of(thread, number), budget(20))
        engine.step([id])
        engine.abort([id])
        stream = engine.stream([prompt_of(thread, number)] * 3, budget(20))
        next(stream)
        if number % 2:
            stream.close()
        del stream
        stats = engine.stats()
        assert 0 <= stats.pages_in_use <= stats.pages_total and stats.running >= 0


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("method", ["none", "dflash", "ngram", "dflash+ngram"])
def test_every_thread_gets_its_own_tokens(driver, method):
    engine = fake_engine(driver, method)
    with ThreadPoolExecutor(THREADS + 2) as pool:
        uses = (generates, streams, steps, leaves, generates, streams, steps, leaves)
        running = [pool.submit(use, engine, thread) for thread, use in enumerate(uses)]
        for future in running:
            future.result(timeout=PATIENCE_S)
    assert list(engine.generate([5, 5], budget(6)).token_ids) == continuation([5, 5], 6, True)
    check_nothing_is_leaked(engine)


def test_threads_on_a_real_engine():
    engine, cases = golden_engine(), trajectories()[1:6]

    def generate(thread):
        params = SamplingParams(max_tokens=12, ignore_eos=True, speculate=thread != 2)
        for case in (cases[thread], cases[thread + 1]):
            output = engine.generate(case["prompt"], params)
            assert list(output.token_ids) == case["greedy"][:12] and output.error is None

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(generate, thread) for thread in range(4)]:
            future.result(timeout=PATIENCE_S)
    check_nothing_is_leaked(engine)


def test_a_fault_in_one_thread_s_step_costs_no_thread_a_token():
    engine = fake_engine()
    faults = [*[None] * 9, "read", *[None] * 9, "before", *[None] * 9, "unread"]
    engine.loop.device.faults = faults
    engine.loop.device.may_fail = lambda: not engine.loop.ledger.suspects
    with ThreadPoolExecutor(4) as pool:
        uses = [pool.submit(use, engine, i) for i, use in enumerate((generates, streams, steps))]
        for future in uses:
            future.result(timeout=PATIENCE_S)
    assert not faults
    check_nothing_is_leaked(engine)


def test_a_waiting_thread_comes_before_one_that_takes_every_turn():
    turn, done, rounds = Turn(), threading.Event(), 0

    def wait_once():
        with turn.held():
            done.set()

    turn.take()
    waiting = threading.Thread(target=wait_once)
    waiting.start()
    while turn._next.acquire(blocking=False):  # until the other thread waits for its turn
        turn._next.release()
        time.sleep(0.001)
    turn.owner = None
    turn.lock.release()
    while not done.is_set():
        with turn.held():
            rounds += 1
    waiting.join()
    assert rounds <= 1, "the one that waited was next"


def test_a_turn_is_given_back_after_an_exception_and_not_taken_twice():
    turn = Turn()
    with pytest.raises(ValueError, match="inside"), turn.held():
        assert turn.is_mine
        with pytest.raises(UsageError, match="call it after the step"):
            turn.take()
        raise ValueError("inside")
    assert not turn.is_mine
    with turn.held():
        pass


def test_the_device_is_lent_to_one_thread_at_a_time():
    engine, seen = fake_engine(), []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyError), engine.borrow_device():
            other = pool.submit(engine.generate, [1, 2], budget(5))
            with pytest.raises(UsageError, match="call it after"):
                engine.generate([1], budget(1))
            seen.append(other.done())
            raise KeyError("the borrower failed")
        assert list(other.result(timeout=PATIENCE_S).token_ids) == continuation([1, 2], 5, True)
    assert seen == [False]
    check_nothing_is_leaked(engine)
