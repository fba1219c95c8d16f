"""The title and the warnings of a benchmark's result."""

import re

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.measure.load import Schedule, Work
from jaxspec.measure.results import _warnings, title


def schedule(*lengths, **options):
    params = SamplingParams(max_tokens=9, temperature=options.pop("temperature", 0.0))
    work = [Work((1,) * length, params) for length in lengths]
    return Schedule(work=work, concurrencies=[1, 2], passes=3, **options)


def row(method, speedup, late=0.0):
    named = {"method": method, "concurrency": 4, "compile_s_while_measured": late}
    return named | ({} if speedup is None else {"speedup": {"median": speedup}})


def warnings_of(*rows, synthetic=False):
    return list(_warnings({"rows": rows, "synthetic": synthetic}))


def test_the_title_names_what_was_sent():
    line = title("tiny (random weights)", "data/some.jsonl", False, schedule(7, 5))
    assert re.sub(r" on .*?:", ":", line) == (
        "tiny (random weights): 2 some.jsonl prompts of 5-7 tokens, up to 9 out, greedy, passes: 3"
    )


def test_the_title_names_unusual_options():
    unusual = schedule(5, 5, temperature=0.7, request_rate=2.5)
    assert title("m", "prose", True, unusual).endswith(
        "prompts of 5 tokens, up to 9 out, temperature 0.7, 2.5 requests/s, adaptive width, "
        "passes: 3"
    )


def test_no_warnings():
    assert warnings_of(row("none", 1.0), row("dflash", 2.0), row("ngram", None)) == []


def test_warnings():
    rows = row("none", 1.0, 0.2), row("dflash", 0.9, 0.1)
    synthetic, slower, late = warnings_of(*rows, synthetic=True)
    assert synthetic.startswith("* SYNTHETIC acceptance")
    assert slower == "dflash is slower than plain decoding at concurrency 4"
    assert late == "warning: 0.3 s of compiling fell into the measured passes"


def test_a_schedule_counts_what_it_sends():
    one = schedule(4, 7, requests_per_slot=3)
    assert [len(one.requests_of_a_pass(concurrency)) for concurrency in (1, 2)] == [3, 6]
    assert one.tokens_of_a_pass() == 9 * (3 + 6)
    assert one.mean_prompt == 5 and not one.draws
    assert schedule(4, temperature=1.0).draws
