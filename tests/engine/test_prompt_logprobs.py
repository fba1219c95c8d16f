"""Log probabilities of prompts, against the forward of the model over whole sequences."""

import functools

import jax
import jax.extend
import numpy as np
import pytest
from fake_device import OVERFLOWS, fake_engine, score
from golden_pair import budget, golden_engine, opened, trajectories
from watching import watch

from jaxspec.engine.setup.warmup import every_program
from jaxspec.engine.step.packed import CHUNK_COLUMNS
from jaxspec.models.whole_sequences import target_logits
from jaxspec.sampling import PIECE
from jaxspec.sampling.logprobs import top_logprobs, top_logprobs_in_pieces

LONGEST = 96
CHUNK = 32


@functools.cache
def whole_forward(prompt: tuple[int, ...]) -> np.ndarray:
    """Log probabilities after every token, in one forward without pages or chunks."""
    logits = jax.jit(target_logits, static_argnums=0)
    target, params = opened().models.target, opened().params["target"]
    padded = np.array([[*prompt, *[0] * (LONGEST - len(prompt))]], np.int32)
    return np.asarray(jax.nn.log_softmax(logits(target, params, padded)[0]))


def check(prompt: list[int], found: tuple, top: int) -> None:
    """Every entry has the prompt's own token first, then the likeliest ones."""
    assert len(found) == len(prompt) and found[0] is None
    expected = whole_forward(tuple(prompt))
    for place in range(1, len(prompt)):
        row, entry = expected[place - 1], found[place]
        likeliest = np.argsort(-row)[:top].tolist()
        assert next(iter(entry)) == prompt[place] and set(entry) == {prompt[place], *likeliest}
        np.testing.assert_allclose(list(entry.values()), row[list(entry)], atol=2e-4)


def prompt_of(length: int) -> list[int]:
    longest = max((case["prompt"] for case in trajectories()), key=len)
    return longest[length : 2 * length]


LENGTHS = (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK, 90)


@pytest.mark.parametrize(
    ("method", "driver"),
    [("dflash", "overlapped"), ("none", "lockstep"), ("ngram", "overlapped")],
)
def test_they_equal_the_forward_over_whole_sequences(method, driver):
    """Prompts of one to three chunks, in batches with requests that ask for none."""
    engine = golden_engine(method=method, driver=driver)
    case, prompts = trajectories()[2], [prompt_of(length) for length in LENGTHS]
    params = [budget(i % 3, prompt_logprobs=(0, 1, 20)[i % 3]) for i in range(len(LENGTHS))]
    prompts += [case["prompt"]] * 2
    params += [budget(20), budget(9, prompt_logprobs=2)]
    if method == "dflash":
        params[-1] = budget(9, logprobs=1, prompt_logprobs=2, temperature=0.8)
    outputs = engine.generate(prompts, params)
    for prompt, asked, output in zip(prompts, params, outputs):
        assert output.finish_reason == "length" and len(output.token_ids) == asked.max_tokens
        if asked.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            assert list(output.token_ids) == case["greedy"][:20]
        else:
            check(prompt, output.prompt_logprobs, asked.prompt_logprobs)
    assert len(outputs[-1].logprobs or ()) == (9 if method == "dflash" else 0)


def test_they_do_not_depend_on_the_chunks():
    options = {"prefill_chunk": 7, "prefill_shapes": ((2, 7),), "method": "none"}
    prompt = prompt_of(90)
    output = golden_engine(**options).generate(prompt, budget(1, prompt_logprobs=3))
    check(prompt, output.prompt_logprobs, 3)


def test_a_prompt_that_is_only_scored_decodes_nothing_and_leaves_its_pages():
    engine = golden_engine()
    ran = watch(engine).ran
    events = list(engine.stream([prompt_of(40)] * 2, budget(0, prompt_logprobs=1)))
    assert set(ran) == {"admit_step", "prefill_step"}
    assert len(events) == 2 and all(event.token_ids == () for event in events)
    for event in events:
        output = event.output
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
        assert event.prompt_logprobs == output.prompt_logprobs is not None
        assert output.stats.generation_tokens == 0 and output.stats.prompt_tokens == 40
    assert engine.free_pages == engine.total_pages and engine.loop.idle


def test_a_prompt_as_long_as_the_context_can_be_scored():
    engine = fake_engine(max_model_len=48)
    output = engine.generate([3] * 48, budget(0, prompt_logprobs=0))
    assert output.prompt_logprobs[47] == {3: score([3] * 47, 3)}


def test_a_scored_prompt_is_read_whole_although_it_is_cached():
    engine, prompt = fake_engine(), [*range(1, 24)]
    first, again = (engine.generate(prompt, budget(2)) for _ in range(2))
    assert first.stats.cached_tokens == 0 < again.stats.cached_tokens
    scored = engine.generate(prompt, budget(2, prompt_logprobs=0))
    assert scored.stats.cached_tokens == 0 and scored.token_ids == first.token_ids
    told = ({prompt[n]: score(prompt[:n], prompt[n])} for n in range(1, len(prompt)))
    assert scored.prompt_logprobs == (None, *told)


def test_logits_that_are_not_finite_end_the_request_where_they_are():
    """The fake model overflows from position 12 on, if the text has a certain token."""
    outputs = fake_engine().generate(
        [[OVERFLOWS, *[1] * 15], [2] * 16], budget(3, prompt_logprobs=0), errors="return"
    )
    assert outputs[0].error.startswith("the logits for position 12 are not finite")
    assert outputs[0].finish_reason == "error" and outputs[0].token_ids == ()
    assert outputs[1].error is None and len(outputs[1].prompt_logprobs) == 16


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("fault", ["before", "donated", "read", "unread"])
def test_a_prompt_that_is_read_again_loses_and_doubles_no_entry(driver, fault):
    """A fault in each of the programs that read chunks of five tokens, and in some after them."""
    prompts = [[*range(1, 24)], [*range(20, 8, -1)], [5, 6, 7]]
    params = [budget(n, prompt_logprobs=scored) for n, scored in ((0, 0), (4, 0), (4, None))]
    for at in (0, 1, 3, 5):
        engine = fake_engine(driver)
        engine.loop.device.faults = [*[None] * at, fault]
        outputs = engine.generate(prompts, params)
        assert not engine.loop.device.faults, "the fault was not met"
        for prompt, output in zip(prompts[:2], outputs):
            told = ({prompt[n]: score(prompt[:n], prompt[n])} for n in range(1, len(prompt)))
            assert output.error is None and output.prompt_logprobs == (None, *told)
        assert outputs[2].prompt_logprobs is None
        assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("shape", [(1, 1), (1, PIECE), (3, 50), (2, PIECE)])
def test_pieces_are_put_together_in_their_order(shape):
    random = np.random.default_rng(0)
    hidden = random.normal(size=(*shape, 8)).astype(np.float32)
    matrix = random.normal(size=(8, 90)).astype(np.float32)
    chosen = random.integers(0, 90, shape).astype(np.int32)
    found = jax.jit(lambda h, c: top_logprobs_in_pieces(lambda x: x @ matrix, h, c, 5))(
        hidden, chosen
    )
    expected = jax.jit(lambda h, c: top_logprobs(h @ matrix, c, 5))(hidden, chosen)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def programs(scores: bool) -> dict[bool, list]:
    """The traced programs that read chunks, by whether they score the prompt."""
    engine, of = golden_engine(method="none"), {False: [], True: []}
    programs = engine.loop.device.programs
    for program in every_program(programs, engine.plan, draws=False, scores=scores):
        if program.name == "prefill_step":
            rows, width = program.inputs[0].integers, program.inputs[0].width
            of[rows.shape[1] > CHUNK_COLUMNS + width].append(program.traced.jaxpr)
    return of


def test_only_a_program_of_its_own_applies_the_head_to_prompts_and_in_pieces():
    vocab = opened().models.target.vocab_size
    assert not programs(scores=False)[True], "it is made only if it is asked for"
    both = programs(scores=True)
    rows = {which: rows_of_logits(jaxprs[0].jaxpr, vocab) for which, jaxprs in both.items()}
    assert max(rows[True]) == PIECE < 4 * CHUNK
    assert max(rows[False]) == 4, "one row for each request of the batch"


def rows_of_logits(jaxpr, vocab: int) -> set[int]:
    """How many rows the arrays have whose last axis is the vocabulary, weights left out."""
    rows = set()
    for equation in jaxpr.eqns:
        for shape in (one.aval.shape for one in equation.outvars):
            if shape and vocab <= shape[-1] < vocab + 64:
                rows.add(int(np.prod(shape[:-1])))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            rows |= rows_of_logits(inner, vocab)
    return rows
