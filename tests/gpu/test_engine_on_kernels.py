"""The engine on the kernels: beside XLA, beside itself without drafts, and under a long load."""

import functools

import numpy as np
from wide_pair import CPU, EVERYWHERE, ON_GPU, Place, engine, margins, prompt

from jaxspec import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from oracles import records

LENGTHS = (1, 5, 17, 40, 64, 65, 100, 127)


def prompts(place: Place, name: str = "engine") -> list[list[int]]:
    return [prompt(place, f"{name} {count}", count) for count in LENGTHS]


def greedy(place: Place) -> SamplingParams:
    return SamplingParams(max_tokens=place.output, logprobs=2, ignore_eos=True)


def generate(engine: Engine, given: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    outputs = engine.generate(given, params)
    assert not [output.error for output in outputs if output.error]
    return outputs


def chosen(output: RequestOutput) -> np.ndarray:
    """The log probability of every token."""
    assert output.logprobs is not None
    return np.array([token[id] for token, id in zip(output.logprobs, output.token_ids)])


@functools.cache
def bounds(place: Place) -> tuple[float, float, float]:
    """How far two runs may be apart in the mean, at most, and in the margin of a token that they
    choose differently. In bfloat16 each is as far from the truth as transformers' bfloat16."""
    if place is CPU:
        return 1e-4, 1e-3, 1e-3
    record = records.read("wide", "4b_width").outputs
    away = np.abs(record["target_bfloat16"] - record["target_float32"])
    return 2 * away.mean(), 3 * away.max(), 3 * away.max()


def agree(place: Place, ours: list[RequestOutput], others: list[RequestOutput]) -> None:
    """Equal tokens with nearly equal log probabilities, up to a near tie."""
    mean, largest, tie = bounds(place)
    compared = []
    for one, other in zip(ours, others, strict=True):
        same = np.array(one.token_ids) == np.array(other.token_ids)
        first = len(same) if same.all() else int(same.argmin())
        compared += [np.abs(chosen(one)[:first] - chosen(other)[:first])]
        if first < len(same):
            assert margins(other.logprobs)[first] < tie
    apart = np.concatenate(compared)
    assert len(apart) > len(ours) * place.output / 4, "nearly all differ early"
    assert apart.mean() < mean and apart.max() < largest


@EVERYWHERE
def test_the_kernels_say_what_xla_says(place: Place, tied: bool = True):
    ours = generate(engine(place, tied), prompts(place), greedy(place))
    by_xla = generate(engine(place, tied, kernels="xla"), prompts(place), greedy(place))
    agree(place, ours, by_xla)


@ON_GPU
def test_the_kernels_say_what_xla_says_with_a_head_of_its_own(place: Place):
    test_the_kernels_say_what_xla_says(place, tied=False)


@ON_GPU
def test_the_portable_kernels_say_what_xla_says(place: Place):
    ours = engine(place, True, kernels="portable")
    assert {use.runs_on for use in ours.kernels if use.op == "paged_attention"} == {"portable"}
    by_xla = generate(engine(place, True, kernels="xla"), prompts(place), greedy(place))
    agree(place, generate(ours, prompts(place), greedy(place)), by_xla)


@EVERYWHERE
def test_one_long_context_is_shared_by_splits(place: Place):
    """A single request, so that several thread blocks share its context."""
    sizes = {"max_batch": 1, "batch_sizes": (1,), "max_model_len": 2048, "num_pages": 40}
    long = [prompt(place, "long", place.context)]
    pair = {
        kernels: generate(
            engine(place, prefill_shapes=((1, 512),), prefill_chunk=512, kernels=kernels, **sizes),
            long,
            greedy(place),
        )
        for kernels in (place.kernels, "xla")
    }
    agree(place, pair[place.kernels], pair["xla"])


def exact(place: Place, method: str) -> Engine:
    """Eight requests of eight tokens: as many as the kernel from attention to attention takes."""
    return engine(place, exact=True, method=method, num_drafts=7, width=8)


def same_bits(one: RequestOutput, other: RequestOutput) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


@EVERYWHERE
def test_drafts_and_neighbours_do_not_change_a_bit(place: Place):
    given = prompts(place, "exact")
    plain = generate(exact(place, "none"), given, greedy(place))
    for method in ("dflash", "ngram"):
        for count in (1, 3, len(given)):
            drafted = generate(exact(place, method), given[:count], greedy(place))
            assert all(map(same_bits, drafted, plain[:count]))


@EVERYWHERE
def test_many_requests_that_come_and_go(place: Place):
    """Staggered starts and ends on all slots, some aborted: the rest as if each were alone."""
    running = exact(place, "ngram")
    lengths = [(3 + 7 * i % 60, 1 + 5 * i % place.output) for i in range(place.requests)]
    given = [prompt(place, f"many {i}", length) for i, (length, _) in enumerate(lengths)]
    params = [SamplingParams(max_tokens=count, logprobs=1, ignore_eos=True) for _, count in lengths]
    outputs, ids, aborted, step = {}, {}, set(), 0
    waiting = list(range(place.requests))
    while waiting or running.num_running or running.num_waiting:
        for i in waiting[: 1 + step % 3]:
            ids[running.submit(given[i], params[i])] = i
        del waiting[: 1 + step % 3]
        for event in running.step(ids):
            if event.output is not None:
                outputs[ids[event.index]] = event.output
        if step % 7 == 6 and (late := [id for id, i in ids.items() if i not in outputs]):
            running.abort(late[-1:])
            aborted.add(ids.pop(late[-1]))
        step += 1
        assert step < 50 * place.requests
    assert len(outputs) + len(aborted) == place.requests and aborted
    assert running.free_pages == running.total_pages
    for i, output in outputs.items():
        [alone] = generate(exact(place, "none"), [given[i]], params[i])
        assert same_bits(output, alone), f"request {i}"
    assert running.free_pages == running.total_pages
