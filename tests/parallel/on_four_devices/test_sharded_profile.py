"""A recording of two devices: each has a line, and exchanges have a scope of their own."""

from wide_models import GREEDY, PROMPTS, wide_engine

from jaxspec.trace.reading import read_trace
from jaxspec.trace.recording import recording
from jaxspec.trace.tables import report, summarise


def test_exchanges_are_a_scope_and_devices_have_lines(tmp_path):
    engine = wide_engine(2, method="none")
    with recording(engine, str(tmp_path), skip=2, steps=3, about={}):
        engine.generate(PROMPTS[:2], GREEDY)
    trace = read_trace(str(tmp_path))
    summary = summarise(trace)
    assert [one["device"] for one in summary["devices"]] == ["cpu 0", "cpu 1"]
    # Two layers with two sums each, and the choice.
    assert [one["exchanges_per_step"] for one in summary["devices"]] == [5, 5]
    assert all(0 < one["exchange_ms_per_step"] for one in summary["devices"])
    scopes = {(scope["phase"], scope["part"]): scope for scope in summary["scopes"]}
    assert scopes["verify", "exchange"]["kernels_per_step"] == 5
    assert sum("cpu 1" in line for line in report(summary, trace.run, top=1)) == 1
