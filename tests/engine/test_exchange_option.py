"""The option `exchange`: what an engine says of it, what it refuses, and its flag."""

import logging
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import bench, chat, generate, serve
from jaxspec.console.flags import filled
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.kernels import kernel_uses, lost_kernels
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.sums import CONVOLVED, OF_PAIRS
from jaxspec.models.kernels import KernelUse, kernels_line
from jaxspec.models.presets import drafter_for, published
from jaxspec.models.targets import target_of
from jaxspec.proposers.drafters import proposer_of
from pallas_kernels import dispatch
from pallas_kernels.dense_chain import MORE_TOKENS

FEW_TOKENS: dict[str, Any] = {"prefill_shapes": ((1, 64),), "prefill_chunk": 64}
"""In every step."""


@pytest.fixture
def on_two_hoppers(monkeypatch: pytest.MonkeyPatch):
    device = types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        compute_capability="9.0",
        core_count=132,
    )
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    monkeypatch.setattr(jax, "device_count", lambda: 2)


def planned(
    name: str = "qwen3-4b", kind: str = "dflash", dtype=jnp.bfloat16, **options: Any
) -> tuple[KernelUse, ...]:
    """What runs each op, for modules without parameters over two devices."""
    config = published(name)
    draft = drafter_for(kind, config)
    models = Models(target_of(config, (0,), dtype), (proposer_of(draft, dtype),))
    options = {"tensor_parallel_size": 2, "max_model_len": 2048, **options}
    return kernel_uses(*plan_engine(models, EngineOptions(**options)))


def of_sums(uses) -> tuple[KernelUse, ...]:
    return tuple(use for use in uses if use.op == "exchange_norm")


class TestWhatIsSaid:
    @pytest.mark.parametrize("name", ["qwen3-4b", "qwen3.5-4b", "qwen3-4b-fp8"])
    def test_what_runs_on_the_kernel_and_what_has_too_many_tokens(self, on_two_hoppers, name):
        uses = planned(name, exchange="mosaic")
        line = "exchange_norm mosaic and psum (target: more than 512 tokens per step)"
        assert line in kernels_line(uses)
        assert not lost_kernels(of_sums(uses)), "XLA adds up more tokens faster"

    def test_activations_in_8_bits_have_kernels_of_their_own(self, on_two_hoppers):
        """The chain rounds them on one GPU only."""
        options: dict[str, Any] = {"exchange": "mosaic", "fp8_activations": True}
        uses = planned("qwen3-4b-fp8", **options)
        reasons = {use.reason for use in uses if use.op == "dense_chain"}
        assert "activations in 8 bits on 2 GPUs; expected one GPU" in reasons
        with pytest.raises(UsageError, match="activations in 8 bits on 2 GPUs"):
            planned("qwen3-4b-fp8", kernels="mosaic", **options)

    def test_512_tokens_are_the_most(self, on_two_hoppers):
        shapes = ((1, 512), (1, 520), (4, 128), (4, 256))
        sizes: dict[str, Any] = {"max_batch": 33, "batch_sizes": (32, 33)}
        sizes |= {"prefill_shapes": shapes, "prefill_chunk": 520}
        everything = planned(exchange="mosaic", **sizes)
        found = {(use.model, use.runs_on): {*use.sizes} for use in of_sums(everything)}
        assert {(1, 512), (4, 128), (32, 16)} <= found["target", "mosaic"]
        assert {(1, 520), (4, 256), (33, 16)} == found["target", "psum"]
        # It drafts a block of 16 for each request, whatever the target reads.
        assert (33, 16) in found["drafter", "psum"] and (32, 16) in found["drafter", "mosaic"]
        [chained] = [
            {*use.sizes}
            for use in everything
            if (use.model, use.op, use.runs_on) == ("drafter", "dense_chain", "mosaic")
        ]
        assert (4, 256) in chained, "a kernel that adds up 64 tokens itself"
        assert not chained & (found["drafter", "psum"] | found["drafter", "mosaic"])

    @pytest.mark.parametrize("kind", ["dflash", "dflash2", "eagle3"])
    def test_psum_is_said_too_and_no_kernel_is_lost_by_it(self, on_two_hoppers, kind):
        uses = planned(kind=kind, exchange="psum")
        assert "exchange_norm psum (exchange is psum)" in kernels_line(uses)
        assert not lost_kernels(of_sums(uses))

    def test_by_default_kernels_add_up_if_they_can(self, on_two_hoppers):
        assert of_sums(planned()) == of_sums(planned(exchange="mosaic"))
        uses = of_sums(planned(kind="eagle3"))
        assert {use.reason for use in uses if use.model == "drafter"} == {OF_PAIRS}
        assert {use.runs_on for use in uses if use.model == "target"} == {"mosaic", "psum"}

    def test_no_line_asks_for_what_is_chosen_already(self, on_two_hoppers):
        uses = planned()
        assert {use.reason for use in uses if use.op == "dense_chain"} == {None, MORE_TOKENS}
        assert not lost_kernels(uses), "so it is no warning"

    def test_without_kernels_xla_adds_up_too(self, on_two_hoppers):
        assert {use.runs_on for use in of_sums(planned(kernels="xla"))} == {"psum"}
        named = of_sums(planned(kernels="xla", exchange="mosaic"))
        assert "mosaic" in {use.runs_on for use in named}

    def test_by_default_xla_adds_up_on_other_devices(self, monkeypatch):
        monkeypatch.setattr(jax, "device_count", lambda: 2)
        uses = of_sums(planned(**FEW_TOKENS))
        assert {use.runs_on for use in uses} == {"psum"}
        assert {use.reason for use in uses} == {"the device is a CPU; expected a Hopper GPU"}

    @pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL"])
    def test_by_default_xla_adds_up_on_untried_gpus(self, on_two_hoppers, monkeypatch, kind):
        dispatch.default_device().device_kind = kind
        assert {use.runs_on for use in of_sums(planned())} == {"psum"}
        assert "mosaic" in {use.runs_on for use in of_sums(planned(exchange="mosaic"))}

    def test_by_default_xla_adds_up_over_several_processes(self, on_two_hoppers, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        uses = of_sums(planned(**FEW_TOKENS))
        assert {use.reason for use in uses} == {"2 processes run together; expected one"}

    @pytest.mark.parametrize(("kind", "why"), [("dflash2", CONVOLVED), ("eagle3", OF_PAIRS)])
    def test_drafters_whose_sums_the_reference_does_not_make(self, on_two_hoppers, kind, why):
        line = kernels_line(planned(kind=kind, exchange="xla", **FEW_TOKENS))
        wanted = f"exchange_norm xla (target: xla was asked for) and psum (drafter: {why})"
        assert wanted in line

    def test_it_stands_behind_the_one_reason_of_all_other_ops(self, monkeypatch):
        monkeypatch.setattr(jax, "device_count", lambda: 2)
        assert kernels_line(planned(exchange="xla", **FEW_TOKENS)) == (
            "kernels: xla for every op (the device is a CPU; expected a Hopper GPU), but "
            "exchange_norm xla (xla was asked for)"
        )

    def test_one_gpu_adds_nothing_up(self, on_two_hoppers, caplog):
        with caplog.at_level(logging.WARNING, logger="jaxspec"):
            uses = planned(exchange="mosaic", tensor_parallel_size=1)
        assert of_sums(uses) == ()
        assert "exchange has no effect: tensor_parallel_size is 1" in caplog.text

    def test_with_several_gpus_nothing_is_ignored(self, on_two_hoppers, caplog):
        with caplog.at_level(logging.WARNING, logger="jaxspec"):
            planned(exchange="mosaic")
        assert "has no effect" not in caplog.text


class TestWhatIsRefused:
    @pytest.mark.parametrize("kernels", ["auto", "xla", "mosaic"])
    @pytest.mark.parametrize(
        ("models", "reason"),
        [
            (dict(kind="dflash2"), f"exchange_norm on 'mosaic': {CONVOLVED}"),
            (dict(kind="eagle3"), f"exchange_norm on 'mosaic': {OF_PAIRS}"),
            (
                dict(name="tiny", dtype=jnp.float32),
                "exchange_norm on 'mosaic': hidden size 64; expected a multiple of 128",
            ),
        ],
    )
    def test_mosaic_never_falls_back(self, on_two_hoppers, models, reason, kernels):
        with pytest.raises(UsageError) as refused:
            planned(exchange="mosaic", kernels=kernels, **models)
        advice = "exchange 'psum' would leave it to XLA"
        assert str(refused.value) == f"exchange is 'mosaic', but {reason}; {advice}"

    def test_what_another_kernel_refuses_is_not_blamed_on_the_exchange(self, on_two_hoppers):
        with pytest.raises(UsageError, match="^kernels is 'mosaic', but .* page size 24"):
            planned(exchange="mosaic", kernels="mosaic", page_size=24)

    def test_it_is_refused_before_any_file_is_read(self):
        with pytest.raises(UsageError) as refused:
            Engine.from_pretrained("no such folder", exchange="mosaic", tensor_parallel_size=2)
        assert str(refused.value) == (
            "exchange is 'mosaic', but the device is a CPU; expected a Hopper GPU, or exchange "
            "'auto' or 'psum'"
        )

    def test_several_processes_are_too(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(UsageError, match="exchange is 'xla', but 2 processes run together"):
            Engine.from_pretrained("no such folder", exchange="xla")


class TestFlag:
    @pytest.mark.parametrize("command", [generate, chat, serve, bench])
    def test_every_command_that_takes_several_gpus_has_it(self, command):
        parser = command._parser()
        models = ["--model", "some"] if command is bench else []
        given = parser.parse_args([*models, "--tensor-parallel-size", "2", "--exchange", "xla"])
        assert filled(EngineOptions, vars(given)).exchange == "xla"
        assert parser.parse_args(models).exchange == "auto"

    def test_the_command_refuses(self, capsys):
        few = ["--prompt-ids", "1,2,3", "--max-tokens", "2", "--max-model-len", "64"]
        assert generate.main([*few, "--exchange", "mosaic"]) == 2
        assert "error: exchange is 'mosaic', but the device is a CPU" in capsys.readouterr().err
