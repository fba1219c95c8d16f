"""The bench command on the golden pair: what it counts, draws, records and refuses."""

import json
import pathlib
import subprocess
import sys

import pytest

from jaxspec import bench, profile

PAIR = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "a"
MODELS = ["--model", str(PAIR / "target"), "--draft-model", str(PAIR / "draft")]
SMALL = [
    *MODELS, "--dtype", "float32", "--no-chat-template", "--num-prompts", "3", "--input-len", "12",
    "--output-len", "10", "--ignore-eos", "--passes", "2", "--concurrency", "2", "--page-size",
    "16", "--prefill-chunk", "16",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def result(folder):
    recorded = ["--profile-dir", f"{folder}/trace", "--profile-skip", "1", "--profile-steps", "3"]
    written = ["--json", f"{folder}/bench.json", "--plot", f"{folder}/bench.png", "--breakdown"]
    assert bench.main([*SMALL, *written, *recorded, "--dump-programs", f"{folder}/programs"]) == 0
    return json.loads((folder / "bench.json").read_text())


def test_every_method_counts_the_tokens_it_emitted(result):
    assert [(r["method"], r["concurrency"]) for r in result["rows"]] == [("none", 2), ("dflash", 2)]
    for row in result["rows"]:
        assert row["speculation"]["generation_tokens"] == 2 * 3 * 10
        assert row["finish_reasons"] == {"length": 2 * 3}
        assert row["speedup"]["median"] > 0
        assert row["compile_s_while_measured"] == 0
        assert row["output_tokens_per_s"]["min"] > 0


def test_acceptance_stays_within_what_was_drafted(result):
    plain, drafted = (row["speculation"] for row in result["rows"])
    assert plain["num_spec_steps"] == 0 < drafted["num_spec_steps"]
    assert drafted["num_accepted_draft_tokens"] <= drafted["num_draft_tokens"]
    assert not drafted["synthetic"] and not result["synthetic"]
    assert drafted["num_spec_steps"] * drafted["mean_acceptance_length"] >= 2 * 3 * 9


def test_the_step_is_taken_apart(result):
    parts = next(row["part_ms"] for row in result["rows"] if row["method"] == "dflash")
    assert set(parts) == {"draft", "verify", "accept"} and min(parts.values()) > 0


def test_the_environment_is_recorded(result):
    assert result["command"].startswith("python -m jaxspec.bench --model")
    assert {"device", "commit", "versions", "XLA_FLAGS"} <= set(result["environment"])


def test_a_cpu_has_no_memory_floor(result):
    """Its caches make steps faster than the bytes over the speed of a copy."""
    assert result["copy_bytes_per_second"] is None
    assert [(row["floor_ms"], row["floor_fraction"]) for row in result["rows"]] == [
        (None, None)
    ] * 2


def test_what_runs_on_kernels_is_recorded(result, folder):
    run = json.loads((folder / "trace" / "run.json").read_text())
    assert set(result["kernels"]) == {"none", "dflash"}
    assert run["kernels"] == result["kernels"]["dflash"]
    assert {use["model"] for use in run["kernels"]} == {"target", "drafter"}
    assert {use["op"] for use in run["kernels"]} == {"qkv_write", "paged_attention"}
    for use in run["kernels"]:
        assert use["runs_on"] == "xla" and "the device is a CPU" in use["reason"]


def test_the_picture_is_one(result, folder):
    picture = (folder / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_programs_are_dumped(result, folder):
    memory = json.loads((folder / "programs" / "memory.json").read_text())
    assert {name["program"].split("-")[1] for name in memory} >= {"prefill_step", "verify_step"}
    text = (folder / "programs" / f"{memory[-1]['program']}.hlo.txt").read_text()
    assert text.startswith("HloModule jit_")


def test_the_trace_is_read_without_a_viewer(result, folder, capsys):
    assert profile.main([f"{folder}/trace", "--json", f"{folder}/profile.json"]) == 0
    out, err = capsys.readouterr()
    assert "verify" in out and "launches/step" in out and "profile.png" in err
    summary = json.loads((folder / "profile.json").read_text())
    assert summary["steps"] == 3 == summary["run"]["steps_recorded"]
    phases = {scope["phase"]: scope for scope in summary["scopes"] if not scope["part"]}
    assert {"draft", "verify", "commit"} <= set(phases)
    parts = {s["part"] for s in summary["scopes"] if s["phase"] == "verify"}
    assert {"attention", "qkv", "gate_up", "down", "head"} <= parts
    assert sum(s["share"] for s in phases.values()) == pytest.approx(1)
    known = sum(s["share"] for name, s in phases.items() if name != "(no scope)")
    assert known > 0.97, "nearly all time has a scope"
    assert (folder / "trace" / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_synthetic_acceptance_is_drawn_and_marked_everywhere(folder, capsys):
    drawn = ["--synthetic-acceptance-rates", "1,1,0.5", "--methods", "dflash"]
    file = folder / "synthetic.json"
    small = [*SMALL, "--passes", "1", "--breakdown"]
    trace = str(folder / "synthetic")
    assert bench.main([*small, *drawn, "--json", str(file), "--profile-dir", trace]) == 0
    assert "* SYNTHETIC" in capsys.readouterr().err
    assert profile.main([trace, "--plot", "-"]) == 0
    assert "SYNTHETIC" in capsys.readouterr().out.splitlines()[0]
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert result["synthetic"] and row["speculation"]["synthetic"]
    assert row["speculation"]["acceptance_rate_per_position"][:2] == [1, 1]
    assert sum(row["speculation"]["accepted_per_position"][3:]) == 0
    assert set(row["part_ms"]) == {"draft", "verify", "accept"}, "steps overlap here"


def test_prompts_are_what_the_model_knows():
    chosen = {}
    for flags in (["--model", "m"], ["--model-shape", "tiny"], []):
        arguments = bench._parser().parse_args(flags)
        chosen[flags[0] if flags else "demo pair"] = bench._default_dataset(arguments)
    assert chosen == {"--model": "prose", "--model-shape": "random", "demo pair": "python"}


def test_adaptive_width_and_options_of_the_methods_arrive(folder, capsys):
    file = folder / "adaptive.json"
    drawn = ["--synthetic-acceptance-rates", "1,1,1", "--adaptive", "--num-drafts", "2"]
    small = [*SMALL, "--passes", "1", "--methods", "dflash,ngram"]
    assert bench.main([*small, *drawn, "--json", str(file)]) == 0
    assert "adaptive width" in capsys.readouterr().err
    drafted, looked_up = json.loads(file.read_text())["rows"]
    assert drafted["compile_s_while_measured"] == 0
    assert drafted["speculation"]["mean_acceptance_length"] > 1
    accepted = looked_up["speculation"]["accepted_per_position"]
    assert sum(accepted[:2]) > 0 == sum(accepted[2:])


def test_several_drawn_lengths_share_programs_and_a_plain_run(folder, capsys):
    drawn = ["--synthetic-acceptance-length", "Low=1.5,7"]
    file, picture = folder / "lengths.json", folder / "lengths.png"
    peers = {"system": "X", "model": "target", "concurrency": 2, "step_ms_median": 3.0}
    both = [peers | {"mode": mode} for mode in ("plain", "dflash")]
    (folder / "peers.json").write_text(json.dumps({"rows": both}))
    outputs = ["--anchors", f"{folder}/peers.json", "--json", str(file), "--plot", str(picture)]
    assert bench.main([*SMALL, "--passes", "1", "--output-len", "24", *drawn, *outputs]) == 0
    result = json.loads(file.read_text())
    rows = {(row["method"], row["acceptance_of"]): row for row in result["rows"]}
    assert list(rows) == [("none", ""), ("dflash", "Low"), ("dflash", "7")]
    low, high = rows["dflash", "Low"], rows["dflash", "7"]
    assert low["drawn_length"] == pytest.approx(1.5) and high["drawn_length"] == pytest.approx(7)
    means = [row["speculation"]["mean_acceptance_length"] for row in (low, high)]
    assert means[0] < 3 < means[1]
    assert all(row["compile_s_while_measured"] == 0 for row in rows.values())
    shown = capsys.readouterr().err
    assert "dflash Low" in shown and "steady decode" in shown and "* SYNTHETIC" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([*MODELS, "--model-shape", "tiny"], 2, "both --model and --model-shape"),
        ([*MODELS, "--concurrency", "1,x"], 2, "--concurrency '1,x'; expected integers"),
        ([*MODELS, "--concurrency", "0"], 2, "expected integers of at least 1"),
        ([*MODELS, "--request-rate", "-1"], 2, "--request-rate is -1.0"),
        ([*MODELS, "--methods", "none,none"], 2, "expected different names"),
        ([*MODELS, "--dataset", "no/such.jsonl"], 1, "cannot be read"),
        ([*MODELS, "--json", "/no/such/folder/x.json"], 1, "there is no folder"),
        ([*MODELS, "--profile-dir", f"{__file__}/x"], 1, "cannot be made"),
        ([*MODELS, "--plot", "x.xyz"], 2, "no pictures of type 'xyz'"),
        ([*MODELS, "--plot", "/no/such/folder/x.png"], 1, "there is no folder"),
        ([*MODELS, "--profile-steps", "0"], 2, "--profile-steps is 0; expected at least 1"),
        ([*MODELS, "--profile-skip", "-1"], 2, "--profile-skip is -1; expected at least 0"),
        ([*MODELS, "--profile-readable"], 2, "add --profile-dir"),
        ([*MODELS, "--profile-concurrency", "3"], 2, "expected one of [1, 4]"),
        ([*MODELS, "--max-model-len", "0"], 2, "--max-model-len is 0; expected more than 0"),
        (
            [*MODELS, "--no-chat-template", "--max-model-len", "9", "--num-prompts", "1"],
            2,
            "max_model_len is 9; expected at least",
        ),
        (
            [*MODELS, "--synthetic-acceptance-rates", "a,b", "--num-prompts", "1"],
            2,
            "expected numbers",
        ),
        ([*MODELS, "--synthetic-acceptance-length", "GSM8K=6.5,x="], 2, "expected numbers"),
    ],
)
def test_mistakes_are_one_line(arguments, code, message, capsys):
    assert bench.main(arguments) == code
    out, err = capsys.readouterr()
    [error] = [line for line in err.splitlines() if not line.startswith("running on ")]
    assert not out and error.startswith("error: ") and message in error


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_readable_profiles_are_prepared_before_jax_starts(command, tmp_path):
    code = (
        f"import os, sys\nfrom jaxspec import {command}\n"
        f"code = {command}.main(sys.argv[1:])\n"
        "assert '--xla_gpu_enable_command_buffer=' in os.environ['XLA_FLAGS'].split()\n"
        "sys.exit(code)"
    )
    outputs = ["--profile-dir", str(tmp_path), "--profile-readable", "--json", f"{tmp_path}/x.json"]
    models = ["--model", str(tmp_path / "none")]
    prompt = ["--prompt", "a"] if command == "generate" else ["--plot", f"{tmp_path}/x.png"]
    run = subprocess.run(
        [sys.executable, "-c", code, *models, *outputs, *prompt], capture_output=True, text=True
    )
    assert (run.returncode, "no such folder" in run.stderr) == (1, True), run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--top", "-1"], 2, "--top is -1"),
        (["--plot", "/no/such/folder/x.png"], 1, "there is no folder"),
        (["--plot", "x.xyz"], 2, "no pictures of type 'xyz'"),
    ],
)
def test_mistakes_in_reading_a_trace_are_found_before_its_tables(arguments, code, message, capsys):
    assert profile.main(["tests/data/traces/h100-8b-dflash", *arguments]) == code
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and message in err


def test_speedups_stand_apart():
    from jaxspec.measure.drawing import pyplot
    from jaxspec.measure.plots import _speedup

    rows = [
        {"method": method, "acceptance_of": "", "concurrency": 1, "speedup": {"median": times}}
        for method, times in (("none", 1.0), ("dflash", 0.65), ("ngram", 0.59))
    ]
    axes = pyplot().figure().gca()
    _speedup(axes, rows, {"dflash": "C0", "ngram": "C1"})
    assert [text.xyann[1] > 0 for text in axes.texts] == [True, False]
    pyplot().close()


def test_plots_without_matplotlib_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench.main([*MODELS, "--plot", "x.png"]) == 1
    assert "jaxspec-decode[plot]" in capsys.readouterr().err
