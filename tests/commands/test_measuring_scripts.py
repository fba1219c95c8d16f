"""The scripts that print published figures run to their end at tiny sizes, and their files say what
was measured, where, and with which code."""

import argparse
import functools
import importlib.util
import json
import pathlib
import runpy
import shlex
import sys

import pytest
from test_scripts import SCRIPTS, run

from jaxspec.engine.setup import step_costs
from jaxspec.measure import environment
from jaxspec.models import presets

ROOT = SCRIPTS.parent
GOLDENS = ROOT / "tests" / "data" / "goldens" / "a"
STANDARD_LIBRARY = pathlib.Path(json.__file__).parents[1]


def passes(report):
    [variant] = report["variants"]
    [one] = variant["passes"]
    assert one["ms"] > 0 <= one["idle_ms"]
    assert all(program["sum_ms"] >= program["ms"] > 0 for program in one["programs"].values())
    assert {name.split()[0] for name in one["programs"]} == {"prefill", "decode"}


def steps(report):
    (row,) = report["rows"]
    assert row["concurrency"] == 1 and row["plain_steps"] == 2 >= row["dflash_steps"] >= 1
    for name in ("plain_device_ms", "plain_engine_ms", "dflash_device_ms", "dflash_engine_ms"):
        assert row[name] > 0
    assert report["accepted_per_step"] == 1 and report["prompt_tokens"] == 8


def spans(report):
    assert [row["phase"] for row in report["phases"]] == ["1 x 2", "2 x 2+1"]
    for row in report["phases"]:
        rates = row["tokens_per_s"]
        assert list(rates) == ["plain", "width 2", "adaptive"] and min(rates.values()) > 0
        assert sum(row["widths"].values()) == 3
        best = max(rates["plain"], rates["width 2"])
        assert row["of_the_best_fixed"] == pytest.approx(rates["adaptive"] / best)
        assert row["of_width_2"] == pytest.approx(rates["adaptive"] / rates["width 2"])


def ngram(report):
    prose, repetitive = report["rows"]
    assert (prose["load"], repetitive["load"]) == ("1 prose", "1 repetitive")
    assert repetitive["wide_steps"] == 1, "text that repeats itself is always looked up"
    for row, kind in ((prose, "prose"), (repetitive, "repetitive")):
        each = row["tokens_per_s_each"]
        assert row["ratio"][kind] == pytest.approx(each["ngram"][kind] / each["plain"][kind])


def exact(report):
    for case in ("replay, in company", "replay, alone"):
        found = report["exact"][case]
        assert found["passed"] and found["largest_logprob_difference"] == 0.0
        assert found["tokens_compared"] == 8 and found["drafts_verified"] > 0
    buckets = report["buckets"]["replay, in company"]
    assert buckets["passed"]
    assert 0 <= buckets["worst_regret_nat"] <= buckets["allowed_regret_nat"]
    assert 0 <= report["leads_nat"]["least"] <= report["leads_nat"]["median"]


def prefix(report):
    assert report["cached_tokens"] == 48 and report["prompts"] == 2
    assert report["equal_tokens"] == report["equal_bits"] == 2
    assert min(report["read_ms"].values()) > 0 and min(report["found_ms"].values()) > 0
    assert min(report["book"].values()) > 0


def kernels(report):
    attention = [row for row in report["rows"] if row["op"] == "paged_attention"]
    assert [row["case"].split()[-1] for row in attention] == ["16", "64"]
    of_delta = {"delta_read", "delta_fold", "delta_prefill"}
    of_layer = {"mixer_step", "block_step", "mixer_fold", "block_fold", "block_folds"}
    of_model = {"paged_attention", "qkv_write", "add_norm", "dense_chain", "fp8_product"}
    assert {row["op"] for row in report["rows"]} == of_model | of_delta | of_layer
    assert all(row["xla_us"] > 0 and row["floor_us"] >= 0 for row in report["rows"])


def splits(report):
    assert [row["case"] for row in report["rows"]] == [
        "Qwen3-tiny out, 8 tokens",
        "Qwen3-tiny gate_up, 8 tokens",
    ]
    for row in report["rows"]:
        assert row["chosen"] and row["right"] and row["error"] < 4e-3
        assert "us" not in row  # the interpreter's time says nothing


def serving(report):
    [other] = report["others"]
    assert [one["prefill_beside_decoding"] for one in (report, other)] == [4, 0]
    for one in report, other:
        alone, server, long = one["in_process"], one["server"], one["beside_a_long_prompt"]
        of_steps = alone["step_ms"], server["step_ms"]
        of_firsts = alone["first_token_ms"], server["first_byte_ms"]
        for times in *of_steps, *of_firsts, one["gaps"], long["gap_ms"]:
            assert times["count"] > 0 and 0 < times["p50"] <= times["p99"] <= times["most"]
        assert long["longest_gap_ms"] == long["gap_ms"]["most"]
        assert long["prompt"] == 96 and long["below_the_bound"] == (long["longest_gap_ms"] < 1000)
        assert [row["arrivals_per_s"] for row in one["curve"]] == [20, 40]
        for row in one["curve"]:
            assert row["requests"] >= 2 and row["tokens_per_s"] > 0
            assert row["first_byte_ms"]["count"] == row["per_token_ms"]["count"] == row["requests"]


def ahead(report):
    found = report["one_request"]
    assert found["programs"] > 0 and report["waits_for_programs"] == 0
    for steps in found["beside_ms"], found["afterwards_ms"]:
        assert steps["steps"] > 0 and 0 < steps["median"] <= steps["most"]
    assert list(report["step_ms"]) == ["1"] and min(report["step_ms"]["1"].values()) > 0


SCRIPTS_AND_CHECKS = {
    "bench_ahead": (
        "--model tiny --dtype float32 --slots 1 --tokens 32 --max-model-len 64",
        ahead,
    ),
    "bench_serving": (
        "--model tiny --dtype float32 --block-size 4 --accepted 2 --streams 3 --prompt 16 "
        "--long-prompt 96 --tokens 32 --page-size 16 --rates 20 40 --seconds 4 --beside 4 0 "
        "--bound 1000",
        serving,
    ),
    "bench_steps": (
        "--model tiny --draft dflash-b2 --concurrency 1 --prompt 8 --max-model-len 40 "
        "--page-size 8 --steps 2 --accepted 1",
        steps,
    ),
    "bench_spans": (
        "--model tiny --phases 1x2,2x2+1 --steps 3 --fixed-steps 2 --block-size 2 --more-widths 1",
        spans,
    ),
    "time_pass": ("--model tiny --slots 2 --prompt 8 --output 6 --passes 1", passes),
    "bench_ngram": (
        "--model tiny --concurrency 1 --num-drafts 3 --prompt 64 --steps 8 --passes 1",
        ngram,
    ),
    "check_exact": (
        "--model tiny --prompts 1 --slots 1 --tokens 8 --longest-prompt 8 --methods replay",
        exact,
    ),
    "bench_prefix": (
        "--model tiny --prompt 64 --page-size 16 --prompts 1 --tokens 4 --book-pages 100 --exact",
        prefix,
    ),
    "tune_fp8_product": (
        "--interpreted --model tiny --tokens 8 --matrix out gate_up",
        splits,
    ),
    "bench_kernels": ("--cases tiny --implementations xla --page-size 16 64", kernels),
}


SMALLER = {
    "bench_ahead": {"PROMPT": list(range(100, 116))},
    "bench_kernels": {"CALLS": 2, "LAYERS": 2, "BYTES_BEYOND_CACHE": 1e5},
    "bench_spans": {"LONGEST": 256, "FIRST_CHUNK": 64},
    "bench_serving": {"serving_load.PAUSE": 0.0, "serving_load.SHORT": 1},
}
"""Sizes that are no options, and that only a GPU needs as they are. A dot separates the name of
another script that the script imports."""


def run_smaller(script: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a script whose constants are changed before it runs."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *given])
    module = imported(script, SCRIPTS / f"{script}.py", monkeypatch)
    for name, value in SMALLER.get(script, {}).items():
        owner, _, constant = name.rpartition(".")
        monkeypatch.setattr(sys.modules[owner] if owner else module, constant, value)
    with pytest.raises(SystemExit) as exit:
        sys.exit(module.cli.run(module.main))
    return exit.value.code


def imported(name: str, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench_serving(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return runpy.run_path(str(ROOT / "scripts" / "bench_serving.py"))


def test_gaps_count_if_they_reach_into_the_time_that_is_asked_about(bench_serving, monkeypatch):
    import serving_load

    one = {"sent": 1.0, "times": [0.1, 0.2, 0.5, 0.6]}
    assert serving_load.gaps_in(one, 1.15, 1.3) == pytest.approx([0.1, 0.3])
    assert serving_load.gaps_in(one, 1.7, 2.0) == [] == serving_load.gaps_in(one, 0.0, 1.0)


def test_streams_that_end_too_early_are_told_of(bench_serving, monkeypatch):
    import serving_load

    rounds = []
    monkeypatch.setattr(serving_load.Load, "prompts", lambda *_: [])
    monkeypatch.setattr(
        serving_load.Load, "round_of_gaps", lambda *_: rounds.append(1) or ([], 0.1)
    )
    with pytest.raises(serving_load.LoadError, match="ask more --tokens"):
        serving_load.Load(0, argparse.Namespace(streams=1)).gaps(0.0)
    assert len(rounds) == serving_load.ROUNDS


def test_what_the_bars_of_serving_are_compared_with(bench_serving):
    times = lambda p50, p99: {"p50": p50, "p99": p99}
    run = {
        "prefill_beside_decoding": 128,
        "in_process": {"step_ms": times(16.0, 18.0), "first_token_ms": times(18.0, 20.0)},
        "server": {"step_ms": times(16.4, 19.0), "first_byte_ms": times(21.0, 22.0)},
        "gaps": times(16.0, 20.0),
    }
    found = bench_serving["compared"](run)
    assert found == pytest.approx(
        {
            "prefill_beside_decoding": 128,
            "step_ratio": 1.025,
            "first_byte_later_ms": 3.0,
            "gap_p99_over_p50": 1.25,
        }
    )
    assert bench_serving["compared"]({"prefill_beside_decoding": 0}) == {
        "prefill_beside_decoding": 0
    }


def check_environment(report) -> None:
    found = report["environment"]
    assert found["device"] == "cpu" and found["commit"] == "0123abc"
    assert {"jaxspec", "jax", "jaxlib"} <= set(found["versions"])
    assert report["command"].startswith("python ")


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "0123abc")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for scripts that start others


def test_other_systems_steps_give_as_many_tokens_as_ours_of_the_whole_width(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = runpy.run_path(str(ROOT / "scripts" / "bench_spans.py"))
    peers = [
        {"system": "one", "mode": "dflash", "concurrency": 2, "step_ms": 4.0},
        {"system": "two", "mode": "dflash", "concurrency": 2, "step_ms": 8.0},
        {"system": "two", "mode": "plain", "concurrency": 2, "step_ms": 1.0},
        {"system": "two", "mode": "dflash", "concurrency": 8, "step_ms": 1.0},
    ]
    # Two requests that get 3 and 2 tokens of a step on average.
    found = script["with_steps_of"](peers, script["Phase"](2, (3.0, 2.0)), block_size=16)
    assert found == pytest.approx({"one": 5 / 4e-3, "two": 5 / 8e-3})


@pytest.fixture
def smaller_pair(monkeypatch):
    """The pair `tiny` with one drafter layer in place of five, and a small vocabulary. Its programs
    compile in half the time, and what a script does with them is the same."""
    one_layer = functools.partial(presets.dflash_for, num_layers=1)
    monkeypatch.setattr(presets, "dflash_for", one_layer)
    monkeypatch.setattr(presets, "VOCABULARY", 512)
    monkeypatch.setattr(presets, "MASK_TOKEN", 511)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller_pair")
@pytest.mark.parametrize("script", SCRIPTS_AND_CHECKS)
def test_a_tiny_run(script, monkeypatch, tmp_path):
    """Whether the figures meet a script's bar depends on the machine and is not asked. So the
    costs of steps are timed once."""
    monkeypatch.setattr(step_costs, "CALLS", 1)
    monkeypatch.setattr(step_costs, "ROUNDS", 1)
    flags, check = SCRIPTS_AND_CHECKS[script]
    result = tmp_path / "result.json"
    run_it = run_smaller if script in SMALLER else run
    code = run_it(script, [*flags.split(), "--json", str(result)], monkeypatch)
    assert not code or "below" in str(code), code
    report = json.loads(result.read_text())
    check_environment(report)
    check(report)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller_pair")
def test_steps_with_a_drafter_in_fp8(monkeypatch, tmp_path):
    monkeypatch.setitem(presets.QWEN3, "tiny", (5, 128, 128, 1, 1, True))
    draft_bytes = {}
    for quantization in ((), ("--draft-quantization", "fp8")):
        result = tmp_path / "result.json"
        flags, _ = SCRIPTS_AND_CHECKS["bench_steps"]
        flags = [*flags.split(), "--methods", "dflash", *quantization, "--json", str(result)]
        run("bench_steps", flags, monkeypatch)
        report = json.loads(result.read_text())
        (row,) = report["rows"]
        assert row["dflash_device_ms"] > 0 < row["dflash_engine_ms"]
        draft_bytes[report["draft_quantization"]] = report["draft_bytes"]
    matrices = 128 * (3 * 128 + 128 + 3 * 128 + 512)  # of one layer, and the head
    saved = matrices - 4 * matrices // 128**2
    assert draft_bytes[None] - draft_bytes["fp8"] == saved


@pytest.mark.slow
def test_held_out_text(monkeypatch, tmp_path):
    """A file of the standard library, of those that the demo pair was not trained on."""
    result = tmp_path / "result.json"
    held_out = (SCRIPTS / "demo_held_out.txt").read_text().split()
    name = next(name for name in held_out if (STANDARD_LIBRARY / name).is_file())
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text((STANDARD_LIBRARY / name).read_text())
    pair = f"--target {GOLDENS / 'target'} --draft {GOLDENS / 'draft'} --page-size 16"
    sizes = "--prompts 1 --prompt-tokens 8 --tokens 8 --batch 1 --passes 1"
    flags = f"--text {tmp_path} {pair} {sizes}"
    assert not run("measure_held_out", [*flags.split(), "--json", str(result)], monkeypatch)
    report = json.loads(result.read_text())
    check_environment(report)
    measured = report["batch 1"]
    assert measured["prompts"] == measured["streams_equal_to_plain"] == 1
    assert measured["plain_tokens_per_second"] > 0 < measured["drafted_tokens_per_second"]


@pytest.mark.slow
def test_loading(monkeypatch, tmp_path):
    result = tmp_path / "load.json"
    flags = f"--folder {tmp_path / 'disk'} --size tiny --out {result}"
    assert not run("bench_load", flags.split(), monkeypatch)
    report = json.loads(result.read_text())
    check_environment(report)
    assert report["load"]["cold"]["parameters"] == report["load"]["warm"]["parameters"] > 0
    assert report["warm_load_gb_s"] > 0 and not list((tmp_path / "disk").iterdir())


@pytest.fixture
def measure_all(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return imported("measure_all", SCRIPTS / "measure_all.py", monkeypatch)


def test_every_planned_command_is_understood(measure_all, monkeypatch, tmp_path):
    """The flags exist, so that no measurement on a GPU ends at its first line."""
    from jaxspec import bench

    planned = [one for group in measure_all.GROUPS.values() for one in group]
    assert len({one.name for one in planned}) == len(planned)
    for one in planned:
        script, *flags = one.arguments(tmp_path / one.name)
        if script == "-m":
            assert flags[0] == "jaxspec.bench"
            arguments = bench._parser().parse_args(flags[1:])
            assert bench._acceptances(arguments) and arguments.max_model_len == 1024
            continue
        monkeypatch.setattr(sys, "argv", [script, *flags])
        name = pathlib.Path(script).stem
        module = imported(f"planned_{name}", ROOT / script, monkeypatch)
        assert str(module.parse().json) == str(tmp_path / f"{one.name}.json")


def measurement(measure_all, name: str, code: str):
    return measure_all.Measurement(name, f"-c {shlex.quote(code)}", 1)


WRITES = "import sys; open(sys.argv[-1], 'w').write('{}')"


def test_what_failed_is_named(measure_all, monkeypatch, tmp_path):
    good = measurement(measure_all, "good", WRITES)
    bad = measurement(measure_all, "bad", "raise SystemExit(3)")
    after = measurement(measure_all, "after", WRITES)
    monkeypatch.setattr(measure_all, "GROUPS", {"first": [good], "second": [bad, after]})
    flags = f"--out {tmp_path} --gpus 2 --cache {tmp_path / 'cache'}"
    monkeypatch.setattr(sys, "argv", ["measure_all.py", *flags.split()])
    with pytest.raises(SystemExit, match="^not run to a good end: bad$"):
        measure_all.main()
    report = json.loads((tmp_path / "measured.json").read_text())
    codes = {name: one["exit_code"] for name, one in report["measured"].items()}
    assert codes == {"good": 0, "bad": 3, "after": 0}
    assert report["environment"]["commit"] == "0123abc"
    assert (tmp_path / "good-h100.json").read_text() == "{}"
    assert (tmp_path / "after-h100.json").read_text() == "{}"


def test_after_the_deadline_nothing_begins_and_what_runs_is_ended(measure_all, tmp_path):
    endless = measurement(measure_all, "endless", "import time; time.sleep(600)")
    late = measure_all.Run(tmp_path, "here", tmp_path, deadline=0.0)
    late.all({"group": [endless]}, gpus=1)
    assert not late.report["measured"]
    late.measure(endless, gpu=0)
    assert late.report["measured"]["endless"]["exit_code"] == -15 and not late.worked(endless)
