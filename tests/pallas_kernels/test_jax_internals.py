"""Each private or experimental interface of jax by itself: the name of the test that fails is the
name of what another version of jax changed. Nothing here needs a GPU."""

import ast
import inspect
import pathlib
import pickle
import tomllib

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu
from pallas_kernels.kept import later
from pallas_kernels.tiles import swizzled, unswizzled

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "pallas_kernels").rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}
OF_KERNELS = "pallas_kernels/jax_internals.py"
OF_CALLS, OF_COMPILED = "pallas_kernels/kept/later.py", "pallas_kernels/kept/compiled.py"
"""Apart, because they are imported at every start and the other imports Mosaic."""
EXPERIMENTAL = ("jax.experimental", "jax.extend", "jax._src", "jax.interpreters", "jaxlib")


def test_only_three_files_import_them():
    importing = {
        path
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
        if name.startswith(EXPERIMENTAL)
    }
    assert importing == {OF_KERNELS, OF_CALLS, OF_COMPILED}


def test_a_compiled_program_is_written_and_loaded():
    doubled = jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    written = pickle.loads(pickle.dumps(serialize_executable.serialize(doubled)))
    devices = jax.local_devices()[:1]
    loaded = serialize_executable.deserialize_and_load(*written, execution_devices=devices)
    assert loaded(jnp.arange(3.0)).tolist() == [0, 2, 4]


def used_names() -> set[str]:
    """Everything that the kernels take from Pallas: pl.when, plgpu.kernel, plgpu.Layout.WGMMA."""
    nodes = (node for tree in TREES.values() for node in ast.walk(tree))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    words = (name.split(".") for name in names if name.replace(".", "").replace("_", "").isalnum())
    wanted = {".".join(w[: 3 if w[1] == "Layout" else 2]) for w in words if w[0] in ("pl", "plgpu")}
    # `store` is new: `jax_internals.store` does without it.
    return wanted - {"plgpu.Layout", "plgpu.store", "plgpu.async_store_smem"}


@pytest.mark.parametrize("name", sorted(used_names()))
def test_pallas_still_has(name: str):
    found = {"pl": pl, "plgpu": plgpu}[name.split(".")[0]]
    for word in name.split(".")[1:]:
        assert hasattr(found, word), f"jax {jax.__version__} has no {name}"
        found = getattr(found, word)


def test_an_operation_of_ours_can_be_traced_and_lowered():
    """What kept/later.py stands on: a primitive with a rule for its shapes and one to lower it."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    kernel = jax.export.export(jax.jit(lambda x: (x * 3, x + 1)), platforms=["cuda"])(shape)
    call = later.lowered_later(lambda: kernel, (shape,), (shape, shape))
    traced = jax.jit(lambda x: call(x)[0] + call(x)[1]).trace(shape)
    assert traced.out_info == shape
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.multiply" in text and "stablehlo.add" in text


def test_the_window_of_versions_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [jax_wanted] = [line for line in project["dependencies"] if line.startswith("jax>")]
    assert jax_wanted.startswith("jax>=") and ",<" in jax_wanted
    window = jax_wanted.removeprefix("jax")
    extras = project["optional-dependencies"]
    plugins = [line for name in ("cuda12", "cuda13", "deviceless") for line in extras[name]]
    for line in plugins:
        assert not line.startswith("jax") or line.endswith(window)


# The instructions, each in a kernel of its own that is lowered for a GPU.


def lowered(body) -> str:
    """The text of a kernel in two thread blocks whose only warpgroup runs this body."""

    def kernel(counters, calls, floats, words, out, *, bars, box):
        arrays = {"counters": counters, "calls": calls, "floats": floats, "words": words}
        body(**arrays, out=out, bars=bars, box=box)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 8), jnp.float32),
        grid=(1,),
        grid_names=("one",),
        cluster=(2,),
        cluster_names=("half",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "bars": plgpu.SMEM((2, 2), jnp.int32),
            "box": plgpu.SMEM((512,), jnp.float32),
        },
    )
    shapes = (
        jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((64, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, 2), jnp.int32),
    )
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


REF = plgpu.RefType()
LAYOUT = plgpu.Layout.WGMMA


def inline(use, *refs: str):
    """A body that passes these arrays to `use`, where instructions are written."""

    def body(**arrays):
        inline_mgpu(arg_types=(REF,) * len(refs))(lambda _, *given: use(*given) and None)(
            *(arrays[name] for name in refs)
        )

    return body


def write_floats(**arrays):
    """Takes an array's registers apart and puts them together again."""

    @inline_mgpu(
        arg_types=((LAYOUT,)),
        return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.dtype(jnp.float32), layout=LAYOUT),
    )
    def there_and_back(_, array):
        floats = internals.floats_of(array)
        again, taken = internals.array_of(floats, (64, 8), LAYOUT)
        assert taken == len(floats) == 64 * 8 // 128
        return again

    value = plgpu.load(arrays["floats"], layout=LAYOUT, optimized=False)
    internals.store(arrays["out"], there_and_back(value))


def write_pairs(**arrays):
    """Reads pairs of bfloat16 from shared memory and makes an array of them."""

    @inline_mgpu(
        arg_types=(REF,),
        return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.dtype(jnp.bfloat16), layout=LAYOUT),
    )
    def pairs_of(_, box):
        address = internals.sum_over_thread(internals.shared_address(box), ((1, 128, 4),))
        load = lambda: internals.ptx(
            "ld.shared.b32 $0, [$1];", address, result_types=internals.int32_type()
        )
        return internals.array_of_pairs([load(), load()], (64, 8), LAYOUT)

    internals.store(arrays["out"], pairs_of(arrays["box"]).astype(jnp.float32))


def write_words(**arrays):
    """Takes an array apart into words and puts it together again, at a scalar's place."""
    scalar = plgpu.Layout.WG_SPLAT

    @inline_mgpu(
        arg_types=(LAYOUT, scalar),
        return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.dtype(jnp.float32), layout=LAYOUT),
    )
    def there_and_back(_, array, number):
        words = internals.words_of(array)
        assert len(words) == 64 * 8 // 128
        words[0] = internals.one_more(internals.number_of(number))
        return internals.array_of_words(words, (64, 8), jnp.float32, LAYOUT)

    value = plgpu.load(arrays["floats"], layout=LAYOUT, optimized=False)
    internals.store(arrays["out"], there_and_back(value, arrays["calls"][0]))


def move_in_one_of_two(**arrays):
    """Loads an array from one of two places in global memory and stores it to the same one."""
    scalar = plgpu.Layout.WG_SPLAT

    @inline_mgpu(arg_types=(REF, REF, scalar))
    def moved(_, first, second, number):
        number = internals.number_of(number)
        address = internals.address_of_one([first, second], number)
        memory = internals.memory_at(address, number, (64, 8), (8, 1), first)
        internals.store_at(memory, internals.load_at(memory, LAYOUT))

    moved(arrays["floats"], arrays["out"], arrays["calls"][0])


def use_flags(words):
    """Signals another GPU from one thread, and waits for it."""
    thread = internals.thread_of_warpgroup(128)
    address = internals.address_of_words(words, thread, internals.int32(32))
    with internals.if_true(internals.is_below(thread, 1)):
        internals.store_flag(internals.bytes_after(address, 64), internals.int32(7))
        late = internals.wait_for_flag(address, internals.int32(7), internals.int32(1000))
        with internals.if_true(late):
            internals.ptx("st.global.b32 [$0], $1;", address, thread)


def use_numbers(words):
    """Two words are stored with a number, waited for, and stored again if they came."""
    thread, number = internals.thread_of_warpgroup(128), internals.int32(7)
    address = internals.address_of_words(words, thread, internals.int32(32))
    cells = [internals.numbered(word, number) for word in (thread, number)]
    internals.ptx("st.relaxed.sys.global.v2.b64 [$0], {$1, $2};", address, *cells)
    found, missing = internals.wait_for_numbered(address, number, internals.int32(1000))
    kept = internals.chosen(missing, internals.int32(0), found[0])
    internals.ptx("st.global.b32 [$0], $1;", address, kept)


def barrier_of(bars):
    return internals.barrier_at(internals.address_of(bars, 1))


FOR_NUMBERS = "numbered", "wait_for_numbered", "chosen"
FOR_FLAGS = (
    "address_of_words",
    "bytes_after",
    "thread_of_warpgroup",
    "is_below",
    "if_true",
    "store_flag",
    "wait_for_flag",
)
CHOOSING = ("address_of_one", "memory_at", "load_at", "store_at")
BODIES = {
    "ptx": inline(lambda: internals.ptx("fence.proxy.async.global;")),
    "inline_mgpu": inline(lambda: None),
    "int32": inline(lambda: internals.int32(3)),
    "float32_type": inline(lambda: internals.float32_type() and None),
    "one_thread_of": inline(
        lambda: [internals.one_thread_of(threads) for threads in ("block", "warpgroup")]
    ),
    "wait_for_warpgroup": inline(internals.wait_for_warpgroup),
    "address_of": inline(
        lambda bars: [internals.address_of(bars), internals.address_of(bars, 1)], "bars"
    ),
    **dict.fromkeys(CHOOSING, move_in_one_of_two),
    "address_in_block": inline(
        lambda bars: internals.address_in_block(bars, internals.int32(1)), "bars"
    ),
    "float_address_of_thread": inline(
        lambda box: internals.float_address_of_thread(internals.address_of(box), 128, 4, 0), "box"
    ),
    "address_of_float": inline(
        lambda floats: internals.address_of_float(floats, internals.int32(5)) and None, "floats"
    ),
    "barrier_at": inline(barrier_of, "bars"),
    "expect_bytes": inline(
        lambda bars: internals.expect_bytes(
            barrier_of(bars), 512, internals.one_thread_of("warpgroup")
        ),
        "bars",
    ),
    "wait_by_parity": inline(
        lambda bars: [internals.wait_by_parity(barrier_of(bars), parity) for parity in (0, 1)],
        "bars",
    ),
    "signal_counter": inline(lambda counters: internals.signal_counter(counters, 2), "counters"),
    "wait_for_counter": inline(
        lambda counters, calls: internals.wait_for_counter(counters, 2, calls, 264),
        "counters",
        "calls",
    ),
    **dict.fromkeys(FOR_FLAGS, inline(use_flags, "words")),
    **dict.fromkeys(FOR_NUMBERS, inline(use_numbers, "words")),
    "number_of": write_words,
    "one_more": write_words,
    "words_of": write_words,
    "array_of_words": write_words,
    "floats_of": write_floats,
    "array_of": write_floats,
    "store": write_floats,
    "int32_type": write_pairs,
    "shared_address": write_pairs,
    "sum_over_thread": write_pairs,
    "array_of_pairs": write_pairs,
}
SHARED = {"tiling", "swizzle"}
"""Descriptions of shared memory."""


@pytest.mark.parametrize("name", BODIES)
def test_it_lowers(name: str):
    assert "mosaic_gpu" in lowered(BODIES[name])


def test_shared_memory_can_be_described():
    assert swizzled((64, 64), jnp.bfloat16).transforms
    assert unswizzled((8, 128), jnp.bfloat16, (2, 64)).transforms


def test_a_counter_is_signalled_and_waited_for_by_the_whole_gpu():
    """`gpu`: neighbours are in other thread blocks. `red` and `ld` are the instructions of both."""
    assert "red.release.gpu.global.add" in lowered(BODIES["signal_counter"])
    assert "ld.relaxed.gpu.global" in lowered(BODIES["wait_for_counter"])


def test_a_counter_is_waited_for_by_whole_warps():
    """A single thread of a warp would wait in a loop that the others have left."""
    loop = lowered(BODIES["wait_for_counter"])
    assert "vote.sync.any.pred" in loop


def test_a_flag_is_set_and_read_in_the_scope_of_the_system():
    """`sys`: other GPUs. The wait ends by the clock."""
    text = lowered(BODIES["wait_for_flag"])
    assert "st.release.sys.global" in text and "ld.acquire.sys.global" in text
    assert "globaltimer" in text


def test_a_word_and_its_number_are_read_as_one():
    text = lowered(BODIES["wait_for_numbered"])
    assert "ld.relaxed.sys.global.v2.b64" in text and "globaltimer" in text


def test_the_accumulator_of_matrix_products_exists():
    assert internals.Accumulator((64, 8), jnp.float32) is not None


def test_every_function_has_its_test():
    functions = inspect.getmembers(internals, inspect.isfunction)
    own = {name for name, f in functions if f.__module__ == internals.__name__}
    assert {name for name in own if not name.startswith("_")} == BODIES.keys() | SHARED
