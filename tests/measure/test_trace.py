"""Traces made by hand: nesting, overlap, streams, and programs that share a name."""

import json
import pathlib
import shutil
import sys

import pytest
from jax.profiler import ProfileData

from jaxspec import profile
from jaxspec.errors import LoadError
from jaxspec.trace.programs import op_names_of
from jaxspec.trace.reading import read_trace
from jaxspec.trace.scopes import scope_of
from jaxspec.trace.tables import report, summarise

HLO = """HloModule jit_spec_step, is_scheduled=true

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), metadata={op_name="slots"}
  %fusion.1 = f32[2]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(spec_step)/draft/a/mlp/down/dot" stack_frame_id=3}
  ROOT fusion.2 = f32[2]{0} fusion(%fusion.1), metadata={op_name="jit(spec_step)/verify/Qwen3/layer_0/layers_0/attention/qkv/norm/mul"}
}
"""  # noqa: E501


def space(planes: dict[str, dict[str, list[tuple]]]) -> bytes:
    """planes -> lines -> events of (name, start us, length us, stats)."""
    text = []
    for plane, lines in planes.items():
        names, stats, body = {}, {}, []
        for number, (line, events) in enumerate(lines.items(), 1):
            body.append(f'lines {{ id: {number} name: "{line}"')
            for name, start, length, event_stats in events:
                id = names.setdefault(name, len(names) + 1)
                body.append(
                    f"events {{ metadata_id: {id} offset_ps: {int(start * 1e6)} "
                    f"duration_ps: {int(length * 1e6)}"
                )
                for key, value in event_stats.items():
                    stat = stats.setdefault(key, len(stats) + 1)
                    kind = "int64_value" if isinstance(value, int) else "str_value"
                    text_value = value if isinstance(value, int) else f'"{value}"'
                    body.append(f"stats {{ metadata_id: {stat} {kind}: {text_value} }}")
                body.append("}")
            body.append("}")
        for name, id in names.items():
            body.append(f'event_metadata {{ key: {id} value {{ id: {id} name: "{name}" }} }}')
        for name, id in stats.items():
            body.append(f'stat_metadata {{ key: {id} value {{ id: {id} name: "{name}" }} }}')
        text.append(f'planes {{ name: "{plane}" {" ".join(body)} }}')
    return ProfileData.text_proto_to_serialized_xspace("\n".join(text))


def of(op, module="jit_spec_step", program=1):
    return {"hlo_op": op, "hlo_module": module, "program_id": program}


@pytest.fixture
def folder(tmp_path):
    def write(planes, programs=(), run=None):
        (tmp_path / "host.xplane.pb").write_bytes(space(planes))
        (tmp_path / "programs.json").write_text(json.dumps(list(programs)))
        (tmp_path / "run.json").write_text(json.dumps(run or {}))
        return str(tmp_path)

    return write


STEPS = {"python": [("step", 0, 50, {"step_num": 4}), ("step", 60, 50, {"step_num": 5})]}
GPU = {
    "/device:GPU:0": {
        "Stream #17(Compute)": [
            ("gemm_a", 0, 10, of("fusion.1")),
            ("gemm_b", 12, 20, of("fusion.2")),
            ("gemm_a", 60, 10, of("fusion.1")),
            ("gemm_b", 70, 20, of("fusion.2")),
            ("MemcpyD2H", 95, 5, {}),
        ],
        "XLA Ops": [("fusion.1", 0, 100, of("fusion.1"))],
    },
    "/host:CPU": STEPS,
}


def test_scopes_of_a_program():
    program = op_names_of(HLO)
    assert program["module"] == "jit_spec_step"
    assert program["op_names"]["fusion.1"] == "jit(spec_step)/draft/a/mlp/down/dot"
    assert scope_of(program["op_names"]["fusion.2"], "") == ("verify", "qkv")


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("jit(spec_step)/draft/qwen3/Qwen3.logits/head/embedding.logits/dot", "", "draft head"),
        ("jit(spec_step)/draft/walk/DFlash._query/transition.query/preceding/gather", "",
         "draft walk"),
        ("jit(f)/draft/dflash/DFlash.confidence/confidence_head/dot", "", "draft confidence_head"),
        ("jit(f)/draft/dflash/layer_0/layers_0/layers_0.convolved/down/convolution/mul", "",
         "draft convolution"),
        ("jit(spec_step)/commit/context/dflash/x/qkv.columns/dot", "", "commit context"),
        ("jit(f)/verify/Qwen3/layer_0/layers_0/attention/attention/dot", "", "verify attention"),
        ("jit(f)/verify/Qwen3/layer_0/layers_0/attention/attention_out/out/dot", "",
         "verify attention_out"),
        ("jit(f)/verify/Qwen3/norm/mul", "", "verify final norm"),
        ("jit(f)/verify/Qwen3/layer_0/layers_0/mlp/down/down/exchange/psum", "",
         "verify exchange"),
        ("jit(f)/shard_map/verify/Qwen3/embedding/exchange/psum", "", "verify exchange"),
        ("verify/Qwen3/embedding/embedding._of_all_shards/exchange/psum", "", "verify exchange"),
        ("reduce_sum", "jit_draft_step", "draft other"),
        ("", "jit_mystery", "(no scope) other"),
    ],
)  # fmt: skip
def test_scope_of_an_instruction(name, module, expected):
    assert " ".join(scope_of(name, module)) == expected


def test_sums_by_scope_gaps_and_steps(folder):
    run = {"bytes": {"verify": 2000}, "copy_bytes_per_second": 1e9}  # 2 us per step
    trace = read_trace(folder(GPU, [op_names_of(HLO)], run))
    summary = summarise(trace)
    assert (summary["steps"], summary["kernels"]) == (2, 5), "other lines repeat the stream's"
    assert summary["kernel_ms"] == pytest.approx(0.065)
    assert summary["wall_ms"] == pytest.approx(0.1) and summary["busy_ms"] == pytest.approx(0.065)
    assert summary["gaps_over_1us"] == 3 and summary["longest_gap_us"] == pytest.approx(28)
    scope = {(s["phase"], s["part"]): s for s in summary["scopes"]}
    assert scope["draft", "down"]["ms_per_step"] == pytest.approx(0.010)
    assert scope["verify", ""]["ms_per_step"] == pytest.approx(0.020)
    assert scope["verify", ""]["floor_fraction"] == pytest.approx(0.1)
    assert sum(s["share"] for s in summary["scopes"] if s["part"]) == pytest.approx(1)
    assert summary["by_kernel"][0] | {"share": 0} == {
        "phase": "verify", "part": "qkv", "name": "gemm_b", "calls": 2,
        "ms": pytest.approx(0.04), "us_per_call": pytest.approx(20), "share": 0,
    }  # fmt: skip
    assert any("gemm_b" in line for line in report(summary, trace.run, top=3))


def test_two_devices_have_a_line_each(folder):
    """The second begins later, so the first waits for it in the exchange."""
    names = {"fusion.1": "verify/mlp/down/dot", "psum.2": "verify/mlp/down/exchange/psum"}
    program = {"module": "jit_decode_step", "op_names": names}
    at = lambda op: of(op, "jit_decode_step")
    planes = {
        f"/device:GPU:{device}": {
            "Stream #1(Compute)": [
                ("gemm", start, 10, at("fusion.1")),
                ("sum", start + 10, 30 - start, at("psum.2")),
            ]
        }
        for device, start in enumerate((0, 20))
    }
    trace = read_trace(folder(planes | {"/host:CPU": STEPS}, [program]))
    summary = summarise(trace)
    keys = ("exchange_ms_per_step", "exchanges_per_step", "busy_ms", "idle_ms")
    first, second = ([one[key] for key in keys] for one in summary["devices"])
    assert first == pytest.approx([0.015, 0.5, 0.040, 0])
    assert second == pytest.approx([0.005, 0.5, 0.020, 0.020])
    assert summary["busy_ms"] == pytest.approx(0.030) and summary["wall_ms"] == pytest.approx(0.04)
    assert summary["longest_gap_us"] == 0 and len(trace.launches) == 2
    assert summary["device_ms_per_step"] == pytest.approx((40 + 20) / 2 / 2 / 1e3)
    scope = {(s["phase"], s["part"]): s["ms_per_step"] for s in summary["scopes"]}
    assert scope["verify", "exchange"] == pytest.approx((30 + 10) / 2 / 2 / 1e3)
    lines = report(summary, trace.run, top=1)
    assert sum(line.startswith("/device:GPU:") for line in lines) == 2
    alone = summarise(read_trace(folder({"/device:GPU:0": planes["/device:GPU:0"]}, [program])))
    assert not any(line.startswith("/device:GPU:") for line in report(alone, {}, top=1))


def test_nested_instructions_count_once_and_threads_overlap(folder):
    host = {
        "worker/1": [("call", 0, 10, of("fusion.1")), ("inner", 2, 6, of("fusion.2"))],
        "worker/2": [("other", 5, 10, of("fusion.2")), ("no instruction", 0, 99, {})],
    }
    summary = summarise(read_trace(folder({"/host:CPU": host}, [op_names_of(HLO)])))
    assert summary["kernel_ms"] == pytest.approx(0.020), (
        "4 of the call itself, 6 inside, 10 on another thread"
    )
    assert summary["busy_ms"] == summary["wall_ms"] == pytest.approx(0.015)


def test_programs_of_one_name_are_told_apart_by_their_instructions(folder):
    other = {"module": "jit_spec_step", "op_names": {"only.here": "jit(f)/accept/x"}}
    host = {"w": [("a", 0, 1, of("fusion.1")), ("b", 2, 1, of("only.here", program=2))]}
    trace = read_trace(folder({"/host:CPU": host}, [other, op_names_of(HLO)]))
    assert [kernel.phase for kernel in trace.kernels] == ["draft", "accept"]


H100 = pathlib.Path(__file__).parents[1] / "data" / "traces" / "h100-8b-dflash"


def test_launches_of_a_program_begin_with_its_first_instruction(folder):
    trace = read_trace(folder(GPU, [op_names_of(HLO)]))
    spans = [(launch.start_ns, launch.end_ns) for launch in trace.launches]
    assert spans == [(0, 32e3), (60e3, 90e3)]
    assert summarise(trace)["device_ms_per_step"] == pytest.approx((32 + 30) / 2 / 1e3)


def test_a_command_buffer_is_one_launch_whatever_is_inside(folder):
    """Its kernels all bear its name as their instruction."""
    buffered = lambda number: (
        of("command_buffer_1") | {"cuda_graph_id": 7, "correlation_id": number}
    )
    stream = [
        (name, start, 10, buffered(number))
        for number, start in ((1, 0), (2, 40))
        for name, start in (("gemm_a", start), ("gemm_b", start + 15))
    ]
    planes = {"/device:GPU:0": {"Stream #1(Compute)": stream}, "/host:CPU": STEPS}
    about = {"mode": "timing", "environment": {"device": "NVIDIA H100"}}
    trace = read_trace(folder(planes, [op_names_of(HLO)], about))
    summary = summarise(trace)
    assert [launch.end_ns - launch.start_ns for launch in trace.launches] == [25e3, 25e3]
    assert summary["device_ms_per_step"] == pytest.approx(0.025)
    assert "--profile-readable" in "".join(report(summary, trace.run, top=1))
    summary["timing_ms_per_step"] = 0.016
    assert "125.0% of the 0.016 ms" in "".join(report(summary, trace.run, top=1))


def test_three_steps_of_an_h100():
    """DFlash iterations of the Qwen3-8B shape, recorded on one H100 (`run.json`) and trimmed by
    `scripts/trim_trace.py`: the scopes account for the steps, and nearly everything has one."""
    trace = read_trace(str(H100))
    summary = summarise(trace)
    assert summary["steps"] == 3 == len(trace.launches)
    assert summary["device_ms_per_step"] == pytest.approx(7.945, abs=0.001)
    parts = [scope for scope in summary["scopes"] if scope["part"]]
    assert sum(scope["ms_per_step"] for scope in parts) == pytest.approx(7.945, rel=0.03)
    phases = {scope["phase"]: scope for scope in summary["scopes"] if not scope["part"]}
    assert phases["verify"]["ms_per_step"] == pytest.approx(6.362, abs=0.001)
    assert phases["draft"]["ms_per_step"] == pytest.approx(1.242, abs=0.001)
    assert phases["(no scope)"]["share"] < 0.002
    attention = [s for s in parts if (s["phase"], s["part"]) == ("verify", "attention")]
    assert attention[0]["kernels_per_step"] == 36, "one per layer"
    assert 0.85 < phases["verify"]["floor_fraction"] < phases["draft"]["floor_fraction"] < 1


def test_a_picture_without_a_flag_may_fail(tmp_path, capsys, monkeypatch):
    shutil.copytree(H100, tmp_path / "trace")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert profile.main([str(tmp_path / "trace")]) == 0
    out, err = capsys.readouterr()
    assert "verify" in out and "no picture: plots need matplotlib" in err
    assert profile.main([str(tmp_path / "trace"), "--plot", str(tmp_path / "it.png")]) == 1


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(LoadError, match="--profile-dir"):
        read_trace(str(tmp_path))
