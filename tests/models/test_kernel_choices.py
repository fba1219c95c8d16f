"""What is said of the kernels is what happens when a program is traced."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict

from jaxspec.cache.block import block_after
from jaxspec.cache.packing import packing_of
from jaxspec.checkpoint.fp8_names import quantised_drafter
from jaxspec.layers.decoder import BlockMask
from jaxspec.layers.kernels import TWO_SIZES, chain_shape
from jaxspec.layers.plain_heads import NOT_NORMED
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.kernels import KernelUse, kernels_line
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import dflash2_for, dflash_for, eagle3_for, qwen3, qwen35
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.qwen35 import Qwen35
from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.dense_chain import ChainShape, api, chain
from pallas_kernels.dense_chain.shape import MOST_ROUNDED_TOKENS
from pallas_kernels.dispatch import Choice, Op
from pallas_kernels.releases import MOVES_REGISTERS

HOPPER = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0", core_count=132
)
SIZES = [(1, 1), (3, 1), (1, 16), (4, 16), (5, 16), (1, 512)]


def shallow(name: str):
    """A target of a published shape with three layers, and a drafter with two for it."""
    config = qwen3(name)
    config = dataclasses.replace(
        config, vocab_size=128, decoder=dataclasses.replace(config.decoder, num_layers=3)
    )
    draft = dataclasses.replace(dflash_for(config, num_layers=2), target_layer_ids=(0,))
    return config, draft


def traced_choices(monkeypatch, run) -> set[tuple[str, Choice]]:
    """What each op chooses while this is traced, with the reference in place of every kernel."""
    found = set()

    def record(op: Op, implementation, *args, **options):
        found.add((op.name, op.choice(implementation, *args, **options)))
        return op.implementations["xla"](*args, **options)

    def record_chain(*args):
        choice = api.chain_choice(*args)
        found.add(("dense_chain", choice))
        return choice

    monkeypatch.setattr(Op, "__call__", record)
    monkeypatch.setattr(chain, "chain_choice", record_chain)
    jax.eval_shape(run)
    return found


def zeros(shapes: dict[str, jax.ShapeDtypeStruct]):
    leaves = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
    return {"params": unflatten_dict(leaves, sep="/")}


def block_of(batch: int, width: int, page_size: int):
    table = jnp.ones((batch, 8), jnp.int32)
    rows = jnp.zeros(batch, jnp.int32)
    return block_after(rows, rows, rows + width, table, width, page_size)


@pytest.mark.parametrize(("batch", "width"), SIZES)
@pytest.mark.parametrize(
    ("name", "dtype", "page_size", "device"),
    [
        ("qwen3-4b", "bfloat16", 64, HOPPER),
        ("qwen3-14b", "bfloat16", 24, HOPPER),
        ("tiny", "float32", 64, HOPPER),
        ("qwen3-4b-fp8", "bfloat16", 64, HOPPER),
        ("qwen3-4b", "bfloat16", 64, types.SimpleNamespace(platform="cpu", device_kind="cpu")),
    ],
)
def test_a_target_says_what_is_traced(
    name, dtype, page_size, device, batch, width, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    model = Qwen3(shallow(name)[0], (), jnp.dtype(dtype))
    shapes = parameter_shapes(model)

    def run():
        block, cache = block_of(batch, width, page_size), model.new_cache(batch, 2, page_size)
        return model.apply(zeros(shapes), block.positions, block, cache)

    said = set(model.kernel_choices(batch, width, page_size))
    assert said == traced_choices(monkeypatch, run)
    if name.endswith("fp8"):
        runs = {op: choice for op, choice in said}
        assert runs["fp8_product"] == Choice("mosaic")
        assert runs["paged_attention"] == Choice("mosaic")
        if batch * width <= 64:
            assert runs["dense_chain"] == Choice("mosaic")
        else:
            assert runs["dense_chain"] == Choice("xla", "more than 64 tokens per step")
            assert runs["add_norm"] == Choice("mosaic")


@pytest.mark.parametrize(("batch", "width"), SIZES)
@pytest.mark.parametrize(
    ("name", "row_by_row"),
    [
        ("qwen3.5-4b", True),
        ("qwen3.5-4b", False),
        ("qwen3.5-27b", True),
        ("tiny-hybrid", True),
        ("tiny-hybrid", False),
    ],
)
def test_a_hybrid_target_says_what_is_traced(
    name, row_by_row, batch, width, monkeypatch: pytest.MonkeyPatch
):
    """A block of drafts that is read and committed, and a chunk of a prompt."""
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    model = Qwen35(qwen35(name), (), jnp.bfloat16, row_by_row=row_by_row)
    config = dataclasses.replace(
        model.config, vocab_size=128, layer_kinds=("delta", "attention"), tie_word_embeddings=True
    )
    model = dataclasses.replace(model, config=config)
    shapes = parameter_shapes(model)

    def run():
        cache = model.new_cache(batch, 2, 64)
        for final in (False, True) if width <= 64 else (True,):
            block = dataclasses.replace(block_of(batch, width, 64), final=final)
            _, _, cache = model.apply(zeros(shapes), block.positions, block, cache)
            cache = cache.commit(block)
        return cache

    said = set(model.kernel_choices(batch, width, 64))
    assert said - {("dense_chain", Choice("xla", TWO_SIZES))} == traced_choices(monkeypatch, run)
    runs = dict(said)
    if name != "tiny-hybrid":
        assert {runs[op].implementation for op in ("delta_prefill", "paged_attention")} == {
            "mosaic"
        }
    if name == "qwen3.5-4b" and batch * width <= 64:
        assert runs["dense_chain"] == Choice("mosaic")


@pytest.mark.parametrize(
    ("width", "row_by_row", "reads"),
    [
        (16, False, "block_read"),
        (16, True, "mixer_read"),
        (1, False, "mixer_read"),
        (17, False, "mixer_read"),
    ],
)
def test_short_blocks_are_read_in_matrix_products(width, row_by_row, reads, monkeypatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    model = Qwen35(qwen35("qwen3.5-4b"), (), jnp.bfloat16, row_by_row=row_by_row)
    ops = dict(model.kernel_choices(8, width, 64))
    assert ops.keys() & {"block_read", "mixer_read"} == {reads}
    assert ops[reads] == ops[reads.replace("read", "fold")] == Choice("mosaic")


def test_drafts_are_read_in_matrix_products_unless_exact_is_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    usual = Qwen35(qwen35("qwen3.5-4b"), (), jnp.bfloat16)
    reads = lambda model: (
        dict(model.kernel_choices(8, 16, 64)).keys() & {"block_read", "mixer_read"}
    )
    assert (reads(usual), reads(usual.reading_row_by_row())) == ({"block_read"}, {"mixer_read"})


@pytest.mark.parametrize(("name", "most"), [("qwen3-4b-fp8", 64), ("qwen3-8b-fp8", 128)])
@pytest.mark.parametrize(("batch", "width"), SIZES)
def test_a_target_that_rounds_activations_says_what_is_traced(
    name, most, batch, width, monkeypatch
):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    model = Qwen3(shallow(name)[0], (), jnp.bfloat16).with_quantised_inputs()
    shapes = parameter_shapes(model)

    def run():
        block, cache = block_of(batch, width, 64), model.new_cache(batch, 2, 64)
        return model.apply(zeros(shapes), block.positions, block, cache)

    said = set(model.kernel_choices(batch, width, 64))
    assert said == traced_choices(monkeypatch, run)
    runs = dict(said)
    assert runs["fp8_product"] == Choice("mosaic")
    if batch * width <= min(most, MOST_ROUNDED_TOKENS):
        assert runs["dense_chain"] == Choice("mosaic")
        assert not runs.keys() & {"add_norm", "gated_product", "silu_gate"}
        return
    is_slower = (name, batch * width) == ("qwen3-4b-fp8", 512)
    gates = "gated_product" if MOVES_REGISTERS and not is_slower else "silu_gate"
    assert runs["add_norm"] == runs[gates] == Choice("mosaic")
    assert len(runs.keys() & {"gated_product", "silu_gate"}) == 1
    assert runs["dense_chain"].implementation == "xla"


@pytest.mark.parametrize("width", [1, 512])
def test_no_8_bit_matrix_is_multiplied_by_a_kernel_if_xla_was_asked_for(width, monkeypatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    model = Qwen3(shallow("qwen3-4b-fp8")[0], (), jnp.bfloat16, "xla")
    shapes = parameter_shapes(model)

    def run():
        block, cache = block_of(2, width, 64), model.new_cache(2, 2, 64)
        return model.apply(zeros(shapes), block.positions, block, cache)

    traced = traced_choices(monkeypatch, run)
    assert {choice for op, choice in traced} == {Choice("xla", dispatch.XLA_ASKED_FOR)}
    assert "fp8_product" in {op for op, _ in traced}


@pytest.mark.parametrize(("batch", "num_packed"), [(8, 32), (8, 64), (32, 128)])
def test_a_target_says_what_is_traced_for_packed_tokens(batch, num_packed, monkeypatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    model = Qwen3(shallow("qwen3-4b")[0], (), jnp.bfloat16)
    shapes = parameter_shapes(model)

    def run():
        block, cache = block_of(batch, 16, 64), model.new_cache(batch, 2, 64)
        packing = packing_of(jnp.full(batch, num_packed // batch, jnp.int32), 16, num_packed)
        return model.apply(zeros(shapes), block.positions, block, cache, packing)

    said = set(model.kernel_choices(batch, 16, 64, num_packed))
    assert said == traced_choices(monkeypatch, run)
    assert (dict(said)["dense_chain"].implementation == "xla") == (num_packed > 64)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(
    ("batch", "window", "rows"),
    [(1, None, 16), (8, None, 16), (1, 8, 16), (8, 8, 16), (8, 2048, 16), (3, None, 7)],
)
def test_a_drafter_says_what_is_traced(batch, window, rows, in_fp8, monkeypatch):
    """Seven rows are those of a block of eight whose every row drafts."""
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    config = shallow("qwen3-4b")[1]
    masks = (BlockMask(causal=False), BlockMask(causal=False, window=window))
    of_seven = dict(block_size=8, anchor_first=True) if rows == 7 else {}
    config = dataclasses.replace(config, block_masks=masks, **of_seven)
    config = quantised_drafter(config, "the drafter") if in_fp8 else config
    model = DFlash(config, jnp.bfloat16)
    hidden, shapes = config.decoder.hidden_size, parameter_shapes(model)

    def run():
        params = zeros(shapes)
        context, block = block_of(batch, 32, 64), block_of(batch, rows, 64)
        features = jnp.zeros((batch, 32, hidden), jnp.bfloat16)
        cache = model.new_cache(batch, 2, 64)
        cache = model.apply(params, features, context, cache, method="write_context")
        embedded = jnp.zeros((batch, rows, hidden), jnp.bfloat16)
        return model.apply(params, embedded, block, cache)

    said = set(model.kernel_choices(batch, 32, 64))
    assert said == traced_choices(monkeypatch, run)
    refused = {choice.reason for op, choice in said if op == "paged_attention"}
    narrow = "a window of 8 positions for 16 tokens that see each other; expected at least 16"
    assert refused == ({None, narrow} if window == 8 else {None})
    runs = dict(said)
    assert runs.get("fp8_product") == (Choice("mosaic") if in_fp8 else None)
    few = batch * 16 <= 64
    assert runs["dense_chain"].implementation == ("mosaic" if few else "xla")


def test_a_drafter_with_convolutions_runs_no_chain_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    target = shallow("qwen3-4b")[0]
    config = dataclasses.replace(
        dflash2_for(target), target_layer_ids=(0,), vocab_size=128, transition=None
    )
    model = DFlash(config, jnp.bfloat16)
    hidden, shapes = config.decoder.hidden_size, parameter_shapes(model)

    def run():
        block, cache = block_of(2, 16, 64), model.new_cache(2, 2, 64)
        return model.apply(zeros(shapes), jnp.zeros((2, 16, hidden), jnp.bfloat16), block, cache)

    said = dict(model.kernel_choices(2, 16, 64))
    traced = dict(traced_choices(monkeypatch, run))
    assert said.pop("dense_chain") == Choice(
        "xla", "convolutions around every sublayer; expected none"
    )
    assert said.keys() == traced.keys() == {"qkv_write", "paged_attention"}
    assert said["paged_attention"] == traced["paged_attention"] == Choice("mosaic")


@pytest.mark.parametrize("head_norms", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_chain_says_what_is_traced(num_layers, head_norms, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)
    config = dataclasses.replace(eagle3_for(shallow("qwen3-4b")[0]), target_layer_ids=(0, 1, 2))
    decoder = dataclasses.replace(
        config.decoder, head_norms=head_norms, num_layers=num_layers, intermediate_size=64
    )
    model = Eagle3(dataclasses.replace(config, decoder=decoder), jnp.bfloat16)
    hidden, shapes = decoder.hidden_size, parameter_shapes(model)

    def run():
        params, cache = zeros(shapes), model.new_cache(4, 2, 64)
        rows = lambda width: (jnp.zeros((4, width, hidden), jnp.bfloat16),) * 2
        cache = model.apply(params, *rows(32), block_of(4, 32, 64), cache, method="write_rows")
        cache = model.apply(params, *rows(1), block_of(4, 1, 64), cache, method="write_rows")
        return model.apply(params, *rows(1), block_of(4, 1, 64), cache)

    said = set(model.kernel_choices(4, 32, 64))
    without_kernel = {one for one in said if one[1].reason == NOT_NORMED}
    assert said - without_kernel == traced_choices(monkeypatch, run)
    assert {op for op, _ in without_kernel} == (set() if head_norms else {"qkv_write"})
    runs = {op: choice.implementation for op, choice in said}
    assert runs == {"paged_attention": "mosaic", "qkv_write": "mosaic" if head_norms else "xla"}
    if not head_norms:
        with pytest.raises(NotForThisKernel, match="heads are not normed"):
            list(model.with_kernels("mosaic").kernel_choices(4, 32, 64))
        asked = dict(model.with_kernels("xla").kernel_choices(4, 32, 64))
        assert asked["qkv_write"] == Choice("xla", dispatch.XLA_ASKED_FOR)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3-0.6b", ChainShape(48, 2048, 1024, 3072, 4096)),
        ("qwen3-4b", ChainShape(48, 4096, 2560, 9728, 6144)),
        ("qwen3-8b", ChainShape(48, 4096, 4096, 12288, 6144)),
        ("qwen3-32b", ChainShape(48, 8192, 5120, 25600, 10240)),
    ],
)
def test_the_chain_is_asked_for_the_sizes_of_the_model(name: str, shape: ChainShape):
    assert chain_shape(qwen3(name).decoder, batch=3, width=16) == shape


def test_the_chain_is_told_of_norms_in_float32():
    decoder = dataclasses.replace(qwen3("qwen3-4b").decoder, wide_norms=True)
    assert chain_shape(decoder, batch=3, width=16).norm_dtype == "float32"


class TestLine:
    def use(self, op: str, reason: str | None = None, model: str = "target") -> KernelUse:
        return KernelUse(model, op, "xla" if reason else "mosaic", reason, ((1, 1),))

    def test_kernels_and_the_reason_why_one_is_not_used(self):
        uses = [self.use("qkv_write"), self.use("dense_chain", "hidden size 5120; expected less")]
        wanted = "kernels: qkv_write mosaic, dense_chain xla (hidden size 5120; expected less)"
        assert kernels_line(uses) == wanted

    def test_an_op_that_runs_on_a_kernel_at_some_sizes_only(self):
        uses = [self.use("dense_chain"), self.use("dense_chain", "more than 64 tokens")]
        assert kernels_line(uses) == "kernels: dense_chain mosaic and xla (more than 64 tokens)"

    def test_a_reason_that_only_the_drafter_has(self):
        uses = [self.use("attention"), self.use("attention", "a window", "drafter")]
        assert kernels_line(uses) == "kernels: attention mosaic and xla (drafter: a window)"

    def test_one_reason_for_everything_is_said_once(self):
        uses = [self.use("qkv_write", "a CPU"), self.use("attention", "a CPU", "drafter")]
        assert kernels_line(uses) == "kernels: xla for every op (a CPU)"

    def test_models_without_our_layers(self):
        assert "layers of their own" in kernels_line([])
