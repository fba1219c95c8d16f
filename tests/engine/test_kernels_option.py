"""The option `kernels`: what it reaches, what it refuses, and what an engine says of it."""

import dataclasses
import logging
import re
import types

import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import generate
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.kernels import kernel_uses, lost_kernels
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.decoder import BlockMask
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.dflash import DFlash
from jaxspec.models.kernels import kernels_line
from jaxspec.models.presets import dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer
from models.toy_recurrent import ToyRecurrent
from pallas_kernels import dispatch
from pallas_kernels.dense_chain import MORE_ROUNDED_TOKENS

ON_CPU = "kernels: xla for every op (the device is a CPU; expected a Hopper GPU)"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    device = types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        compute_capability="9.0",
        core_count=132,
    )
    monkeypatch.setattr(dispatch, "default_device", lambda: device)


def pair(
    name: str = "qwen3-4b",
    dtype=jnp.bfloat16,
    window: int | None = None,
    scales_of_outputs: bool = False,
) -> Models:
    """Modules without parameters."""
    target = qwen3(name)
    if scales_of_outputs:
        decoder = dataclasses.replace(target.decoder, fp8=Fp8(blocks=False))
        target = dataclasses.replace(target, decoder=decoder)
    draft = dflash_for(target)
    if window is not None:
        masks = (BlockMask(causal=False, window=window), *draft.block_masks[1:])
        draft = dataclasses.replace(draft, block_masks=masks)
    drafter = DFlashProposer(DFlash(draft, dtype))
    return Models(Qwen3(target, draft.target_layer_ids, dtype), (drafter,))


def planned(models: Models, **options):
    models, plan = plan_engine(models, EngineOptions(max_model_len=256, **options))
    return models, kernel_uses(models, plan)


class TestWhatItReaches:
    @pytest.mark.parametrize("kernels", ["mosaic", "portable", "xla"])
    def test_target_and_drafter_of_every_program(self, on_hopper, kernels: str):
        models, _ = planned(pair(), kernels=kernels)
        assert models.target.implementation == kernels
        assert models.proposers[0].drafter.implementation == kernels

    def test_auto_leaves_the_models_as_they_are(self, on_hopper):
        own = pair()
        target = own.target.with_kernels("portable")
        models, _ = planned(dataclasses.replace(own, target=target))
        assert models.target.implementation == "portable"

    def test_programs_of_different_kernels_are_different(self, on_hopper):
        made = {kernels: planned(pair(), kernels=kernels)[0] for kernels in ("auto", "xla")}
        assert made["auto"] is not made["xla"]
        assert made["auto"].target != made["xla"].target
        assert planned(pair(), kernels="xla")[0] is made["xla"]


class TestWhatItRefuses:
    def test_mosaic_needs_a_hopper_gpu(self):
        with pytest.raises(UsageError, match="kernels is 'mosaic', but the device is a CPU"):
            planned(pair(), kernels="mosaic")

    def test_portable_kernels_need_a_gpu_since_ampere(self, monkeypatch):
        said = "the device is a CPU; expected a GPU since Ampere, or kernels 'auto' or 'xla'"
        with pytest.raises(UsageError, match=f"kernels is 'portable', but {said}"):
            planned(pair(), kernels="portable")
        device = types.SimpleNamespace(
            platform="gpu", device_kind="Tesla V100", compute_capability="7.0"
        )
        monkeypatch.setattr(dispatch, "default_device", lambda: device)
        with pytest.raises(
            UsageError, match=r"Tesla V100 \(compute capability 7.0\); expected a GPU"
        ):
            planned(pair(), kernels="portable")

    def test_portable_kernels_are_not_there_for_matrices_in_8_bits(self, on_hopper):
        with pytest.raises(
            UsageError, match="kernels is 'portable', but fp8_product on 'portable'"
        ):
            planned(pair("qwen3-4b-fp8"), kernels="portable")

    def test_it_is_refused_before_any_file_is_read(self):
        with pytest.raises(UsageError, match="the device is a CPU; expected a Hopper GPU"):
            Engine.from_pretrained("no such folder", kernels="mosaic")

    @pytest.mark.parametrize(
        ("models", "options", "reason"),
        [
            (
                dict(name="qwen3-14b"),
                {},
                "dense_chain on 'mosaic': inner size 17408; expected at m",
            ),
            (dict(dtype=jnp.float32), {}, "queries and pages in float32; expected a 16-bit dtype"),
            (
                dict(window=8),
                {},
                "a window of 8 positions for 16 tokens that see each other; expected at least 16",
            ),
            ({}, dict(page_size=24), "page size 24; expected one that divides 64"),
            (
                dict(name="qwen3-4b-fp8", scales_of_outputs=True),
                dict(fp8_activations=True),
                "dense_chain on 'mosaic': activations in 8 bits with one scale per token; expected",
            ),
        ],
    )
    def test_mosaic_never_falls_back(self, on_hopper, models, options, reason: str):
        with pytest.raises(UsageError, match=reason) as refused:
            planned(pair(**models), kernels="mosaic", **options)
        assert "\n" not in str(refused.value)

    def test_activations_in_8_bits_run_in_the_chain(self, on_hopper):
        options = {"kernels": "mosaic", "fp8_activations": True, "max_batch": 4}
        _, uses = planned(pair("qwen3-4b-fp8"), **options)
        chains = {use.runs_on: use.reason for use in uses if use.op == "dense_chain"}
        assert chains == {"mosaic": None, "xla": "more than 64 tokens per step"}

    def test_activations_in_8_bits_run_in_the_chain_for_more_tokens_of_8b(self, on_hopper):
        options = {"kernels": "mosaic", "fp8_activations": True, "max_batch": 32}
        _, uses = planned(pair("qwen3-8b-fp8"), **options)
        chains = {
            use.runs_on: use.reason
            for use in uses
            if (use.model, use.op) == ("target", "dense_chain")
        }
        assert chains == {"mosaic": None, "xla": MORE_ROUNDED_TOKENS}
        assert not lost_kernels(uses)

    def test_many_tokens_per_step_are_no_reason(self, on_hopper):
        _, uses = planned(pair(), kernels="mosaic", max_batch=32)
        assert {use.reason for use in uses} == {None, "more than 64 tokens per step"}
        assert not lost_kernels(uses)

    @pytest.mark.parametrize("kernels", ["mosaic", "xla"])
    def test_a_target_with_layers_of_its_own(self, on_hopper, kernels: str):
        with pytest.raises(UsageError, match="the target ToyRecurrent has layers of its own"):
            planned(Models(ToyRecurrent()), kernels=kernels)


class TestWhatIsSaid:
    def test_all_kernels_of_a_model_that_fits(self, on_hopper):
        _, uses = planned(pair(), max_batch=4, batch_sizes=(4,), prefill_shapes=((1, 64),))
        assert (
            kernels_line(uses)
            == "kernels: qkv_write mosaic, paged_attention mosaic, dense_chain mosaic"
        )
        assert {use.model for use in uses} == {"target", "drafter"}
        assert set().union(*(use.sizes for use in uses)) == {(4, 1), (4, 16), (1, 64)}

    def test_all_kernels_of_a_target_in_8_bits(self, on_hopper):
        _, uses = planned(pair("qwen3-4b-fp8"), kernels="mosaic", max_batch=32)
        assert "fp8_product mosaic, dense_chain mosaic and xla (more than" in kernels_line(uses)
        assert not lost_kernels(uses)

    def test_tokens_that_requests_share_are_few_enough_for_the_chain(self, on_hopper):
        options = dict(max_batch=8, batch_sizes=(8,), prefill_shapes=((1, 64),), adaptive=True)
        _, uses = planned(pair(), **options)
        sizes = {(use.model, use.op, use.runs_on): set(use.sizes) for use in uses}
        packed = {(32, 1), (64, 1)}
        assert packed <= sizes["target", "dense_chain", "mosaic"]
        assert sizes["target", "dense_chain", "xla"] == {(8, 16)}
        assert not any(packed & of_use for use, of_use in sizes.items() if use[0] == "drafter")

    @pytest.mark.parametrize(
        ("models", "options", "part"),
        [
            (
                dict(name="qwen3-14b"),
                {},
                "dense_chain xla (inner size 17408; expected at most",
            ),
            ({}, dict(page_size=24), "paged_attention xla (page size 24; expected"),
            (dict(window=8), {}, "paged_attention mosaic and xla (drafter: a window of 8"),
            (
                dict(name="qwen3-4b-fp8", scales_of_outputs=True),
                dict(fp8_activations=True),
                "dense_chain mosaic and xla (activations in 8 bits with one scale per token; exp",
            ),
        ],
    )
    def test_a_lost_kernel_is_named_and_is_a_warning(self, on_hopper, models, options, part: str):
        _, uses = planned(pair(**models), **options)
        assert part in kernels_line(uses)
        assert lost_kernels(uses)

    def test_portable_kernels_and_what_they_leave_to_xla(self, on_hopper):
        _, uses = planned(pair(), kernels="portable")
        assert kernels_line(uses) == (
            "kernels: qkv_write portable, paged_attention portable, dense_chain xla (portable was "
            "asked for), add_norm portable"
        )
        assert not lost_kernels(uses)

    def test_a_gpu_without_these_kernels_is_a_warning_too(self, monkeypatch):
        device = types.SimpleNamespace(
            platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"
        )
        monkeypatch.setattr(dispatch, "default_device", lambda: device)
        _, uses = planned(pair())
        assert lost_kernels(uses)
        assert kernels_line(uses) == (
            "kernels: qkv_write portable, paged_attention portable, dense_chain xla (the device is "
            "NVIDIA A100 (compute capability 8.0); expected a Hopper GPU (sm_90)), add_norm "
            "portable; nothing has been timed on NVIDIA A100"
        )
        assert not lost_kernels(planned(pair(), kernels="xla")[1])

    def test_an_engine_logs_one_line_and_keeps_it(self, caplog: pytest.LogCaptureFixture):
        with caplog.at_level(logging.INFO, logger="jaxspec"):
            engine = Engine.from_pretrained(*jaxspec.demo_pair(), max_model_len=64, max_batch=1)
        lines = [record for record in caplog.records if "kernels:" in record.message]
        assert [(line.levelname, line.message) for line in lines] == [("INFO", ON_CPU)]
        assert kernels_line(engine.stats().kernels) == ON_CPU

    def test_the_command_refuses_and_tells(self, capsys: pytest.CaptureFixture[str]):
        few = ["--prompt-ids", "1,2,3", "--max-tokens", "2", "--max-model-len", "64"]
        assert generate.main([*few, "--kernels", "mosaic"]) == 2
        [error] = re.findall("^error: (.*)$", capsys.readouterr().err, re.MULTILINE)
        assert error.startswith("kernels is 'mosaic', but the device is a CPU")
        assert generate.main([*few, "--kernels", "xla", "--json", "-"]) == 0
        output, said = capsys.readouterr()
        assert "kernels: xla for every op (xla was asked for)\n" in said
        assert '"runs_on": "xla", "reason": "xla was asked for"' in output
