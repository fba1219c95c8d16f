"""Requests beside each other: whoever comes, goes or reads, each gets its own."""

from golden_pair import budget, check_golden, golden_engine, trajectories
from watching import watch


def take_turns(streams: dict) -> dict:
    outputs = {}
    while streams:
        for name in list(streams):
            event = next(streams[name], None)
            if event is None:
                del streams[name]
            elif event.output is not None:
                outputs[name] = event.output
    return outputs


def test_two_streams_on_one_engine_and_another_engine_beside_it():
    one, other = golden_engine("a"), golden_engine("as")
    cases = {"x": (one, 1), "y": (one, 4), "z": (other, 4)}
    streams = {
        name: engine.stream(trajectories()[i]["prompt"], budget(40))
        for name, (engine, i) in cases.items()
    }
    outputs = take_turns(streams)
    for name, (engine, i) in cases.items():
        check_golden(outputs[name], trajectories("a" if engine is one else "as")[i], 40)


def test_a_reader_that_leaves_gives_its_pages_back():
    engine, case = golden_engine(), trajectories()[2]
    stay = engine.stream(case["prompt"], budget(40))
    next(stay)
    leave = engine.stream([c["prompt"] for c in trajectories()[3:6]], budget(90))
    for _ in range(4):
        next(leave)
    assert engine.free_pages < engine.total_pages - 10
    leave.close()
    assert len(engine.loop.ledger.running) == 1
    check_golden([event.output for event in stay][-1], case, 40)
    assert engine.free_pages == engine.total_pages
    assert not engine.loop.ledger.increments


def test_one_of_many_is_cancelled():
    engine, cases = golden_engine(), trajectories()[1:5]
    stream = engine.stream([c["prompt"] for c in cases], budget(30))
    outputs, told = {}, 0
    for event in stream:
        told += event.index == 1
        if told == 3:
            engine.loop.abort([list(engine.loop.ledger.running)[1]])
            told += 1
        if event.output is not None:
            outputs[event.index] = event.output
    assert outputs[1].finish_reason == "abort"
    count = len(outputs[1].token_ids)
    assert 0 < count < 30 and list(outputs[1].token_ids) == cases[1]["greedy"][:count]
    for index in (0, 2, 3):
        check_golden(outputs[index], cases[index], 30)


def test_short_then_long_and_ends_while_others_are_read():
    """Slots are used again by longer prompts; a budget ends in the middle of a long prefill."""
    engine = golden_engine()
    short = engine.generate(trajectories()[0]["prompt"], budget(3))
    check_golden(short, trajectories()[0], 3)
    cases = [trajectories()[i] for i in (7, 0, 6, 1)]
    budgets = [6, 2, 8, 5]
    order = []
    stream = engine.stream([c["prompt"] for c in cases], [budget(b) for b in budgets])
    outputs = {e.index: order.append(e.index) or e.output for e in stream if e.output}
    assert order.index(1) < order.index(0)
    for index, (case, max_tokens) in enumerate(zip(cases, budgets)):
        check_golden(outputs[index], case, max_tokens)


def test_a_long_prompt_holds_others_up_by_one_chunk():
    """While it is read, a request that decodes gets a step between any two chunks."""
    engine = golden_engine(driver="lockstep")
    ran = watch(engine).ran
    early = engine.stream(trajectories()[8]["prompt"], budget(40))
    next(early)
    late = engine.stream(trajectories()[7]["prompt"], budget(2))
    ran.clear()
    take_turns({"early": early, "late": late})
    chunks = [i for i, step in enumerate(ran) if step == "prefill_step"]
    assert len(chunks) == -(-300 // 32)
    assert all("verify_step" in ran[a:b] for a, b in zip(chunks, chunks[1:]))


def test_a_stream_that_nobody_reads_holds_nothing():
    engine = golden_engine()
    events = engine.stream([case["prompt"] for case in trajectories()[:2]], budget(8))
    assert len(engine.loop.ledger.waiting) == 2
    del events
    assert engine.loop.idle and engine.free_pages == engine.total_pages


def test_submitted_requests_are_aborted():
    engine, cases = golden_engine(), trajectories()[1:4]
    ids = [engine.submit(case["prompt"], budget(40)) for case in cases]
    while engine.num_decoding < len(ids):
        engine.step([])
    engine.abort(ids[1:])
    outputs = {}
    while not outputs:
        outputs = {e.index: e.output for e in engine.step(ids) if e.output is not None}
    assert list(outputs) == ids[:1]
    check_golden(outputs[ids[0]], cases[0], 40)
    engine.step([])
    assert engine.loop.idle and engine.free_pages == engine.total_pages
    assert not engine.loop.ledger.increments
