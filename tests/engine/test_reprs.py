"""What a notebook shows of the public records: one line, with what a person wants to know."""

import dataclasses

from fake_device import fake_engine
from golden_pair import budget, golden_engine, opened

from jaxspec import EngineOptions, SamplingParams

LONGEST = 320


def test_public_records_are_one_short_line():
    engine = fake_engine()
    output = engine.generate([3, 1, 4], budget(40))
    *_, event = engine.stream([3, 1, 4], budget(40))
    stats = engine.stats()
    records = [output, event, output.stats, stats, stats.finished, stats.latencies]
    records += [golden_engine(), opened(), opened().tokenizer, golden_engine().options]
    for record in records:
        text = repr(record)
        assert "\n" not in text and len(text) <= LONGEST, text
        assert text.startswith(type(record).__name__ + "(")


def test_an_engine_names_models_method_sizes_dtype_and_device():
    text = repr(golden_engine())
    assert text.startswith("Engine(Qwen3 ") and " + DFlash " in text
    assert "dflash with up to 7 drafts, max_batch=4, max_model_len=448, num_pages=" in text
    assert text.endswith(", float32, cpu)")
    assert "Engine(Qwen3 " in (plain := repr(golden_engine(method="none"))) and "no drafts" in plain


def test_an_output_shows_its_text_and_how_it_ended():
    engine = fake_engine()
    output = dataclasses.replace(engine.generate([3, 1, 4], budget(40)), text="a\nb" * 100)
    length = f"{output.stats.mean_acceptance_length:.3g}"
    assert repr(output) == (
        f"RequestOutput(text={('a\nb' * 100)[:60]!r}..., 40 tokens, finish_reason='length', "
        f"mean_acceptance_length={length})"
    )
    failed = engine.generate([1] * 40, budget(40), errors="return")
    assert repr(failed).startswith("RequestOutput(0 tokens, error='prompt of 40 and")


def test_parameters_and_options_show_what_differs_from_the_defaults():
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(max_tokens=3, stop="x", temperature=0.5)
    assert repr(params) == "SamplingParams(max_tokens=3, temperature=0.5, stop=('x',))"
    assert eval(repr(params)) == params
    assert repr(EngineOptions(exact=True)) == "EngineOptions(exact=True)"
