"""Lowered kernels that are kept for the next process."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.add_norm.api import add_norm
from pallas_kernels.kept import call as calls
from pallas_kernels.kept import compiled as compiled_kernels
from pallas_kernels.kept import keep_lowered_kernels, kept, lowered_by_workers
from pallas_kernels.kept import kernel as kernels
from pallas_kernels.kept.workers import Workers


class Files(dict):
    """Kept in memory."""

    def read(self, name):
        return self.get(name)

    def write(self, name, content):
        self[name] = content


@pytest.fixture
def files(monkeypatch):
    """As on a GPU. What stands for a kernel is lowered for one, and never run."""
    monkeypatch.setattr(calls, "_on_gpu", lambda: True)
    monkeypatch.setattr(calls, "_functions", {})
    files = Files()
    keep_lowered_kernels(files)
    yield files
    keep_lowered_kernels(None)


class Kernel:
    """Counts how often it is traced."""

    def __init__(self):
        self.traced = 0
        self.call = kept(static_argnames=("scale", "interpret"))(self.kernel)

    def kernel(self, x, y, *, scale, interpret=None):
        self.traced += 1
        return {"sum": x * scale + (0 if y is None else y)}


X = jax.ShapeDtypeStruct((4,), jnp.float32)


def lowered(kernel, scale=2.0, shape=X, layers=3) -> str:
    """A program of several layers, each with a call."""

    def layers_of(x):
        for _ in range(layers):
            x = kernel.call(x, None, scale=scale)["sum"]
        return x

    return jax.jit(layers_of).trace(shape).lower(lowering_platforms=("cuda",)).as_text()


def forget(monkeypatch):
    """What a new process does not know."""
    monkeypatch.setattr(calls, "_functions", {})
    jax.clear_caches()


def test_a_kernel_is_lowered_once_for_all_layers_and_processes(files, monkeypatch):
    kernel = Kernel()
    text = lowered(kernel)
    assert kernel.traced == 1 and len(files) == 1
    assert text.count("stablehlo.multiply") == 1, "every layer has a copy of its own"
    forget(monkeypatch)
    assert lowered(kernel) == text
    assert kernel.traced == 1


def test_other_shapes_and_static_arguments_are_other_kernels(files):
    kernel = Kernel()
    lowered(kernel)
    lowered(kernel, scale=3.0)
    lowered(kernel, shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    lowered(kernel, shape=jax.ShapeDtypeStruct((4,), jnp.bfloat16))
    assert len(files) == 4


def test_an_edited_source_is_another_kernel(files, monkeypatch):
    kernel = Kernel()
    lowered(kernel)
    forget(monkeypatch)
    monkeypatch.setattr(kernels, "surroundings", lambda: "edited")
    lowered(kernel)
    assert kernel.traced == 2 and len(files) == 2


def test_what_cannot_be_read_is_lowered_again(files, monkeypatch):
    kernel = Kernel()
    text = lowered(kernel)
    name = next(iter(files))
    files[name] = b"not a kernel"
    forget(monkeypatch)
    assert lowered(kernel) == text
    assert kernel.traced == 2 and files[name] != b"not a kernel"


def test_nothing_is_kept_without_files_or_when_interpreted(files):
    kernel = Kernel()
    kernel.call(jnp.ones(4), None, scale=2.0, interpret="yes")
    assert not files
    keep_lowered_kernels(None)
    assert kernel.call(jnp.ones(4), jnp.ones(4), scale=2.0)["sum"].tolist() == [3.0] * 4
    assert not files


@kept(static_argnames=("scale", "interpret"))
def scaled(x, *, scale, interpret=None):
    """Stands for a kernel that another process can import."""
    return {"scaled": x * scale}


def program_of_scaled(scale: float) -> jax.stages.Traced:
    return jax.jit(lambda x: scaled(scaled(x, scale=scale)["scaled"], scale=scale)).trace(X)


def text_of(traced: jax.stages.Traced) -> str:
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_worker_lowers_as_this_process_does(files, monkeypatch):
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_written", lowered_here)
        with lowered_by_workers():
            by_worker = text_of(program_of_scaled(3.0))
    forget(monkeypatch)
    files.clear()
    assert text_of(program_of_scaled(3.0)) == by_worker
    assert len(files) == 1


def test_a_worker_takes_over_the_settings_of_the_thread_that_asks(files, monkeypatch):
    """A precision, set for the whole process or for a block, decides how products are lowered."""
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    monkeypatch.setattr(kernels, "_written", lowered_here)
    texts = []
    with lowered_by_workers():
        for precision in "highest", "bfloat16":
            with jax.default_matmul_precision(precision):
                texts.append(text_of(program_of_square()))
    assert "HIGHEST" in texts[0] and "HIGHEST" not in texts[1]


@kept(static_argnames=("interpret",))
def square(x, *, interpret=None):
    return {"square": x @ x}


def program_of_square() -> jax.stages.Traced:
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return jax.jit(lambda x: square(x)["square"]).trace(shape)


def lowered_here(*_):
    raise AssertionError("this process lowered the kernel, and not the worker")


def test_what_workers_cannot_lower_this_process_lowers(files, monkeypatch, caplog):
    """The worker cannot import a kernel that is a method, and says so."""
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    kernel = Kernel()
    with lowered_by_workers(), caplog.at_level("INFO", "pallas_kernels"):
        traced = jax.jit(lambda x: kernel.call(x, None, scale=2.0)["sum"]).trace(X)
        assert kernel.traced == 1
        text = text_of(traced)
    assert "stablehlo.multiply" in text and len(files) == 1
    assert "because no worker process did" in caplog.text


def test_a_program_can_be_lowered_after_its_workers_have_ended(files):
    with lowered_by_workers():
        traced = program_of_scaled(5.0)
    assert calls._keeping.workers is None
    assert "stablehlo.multiply" in text_of(traced)
    assert len(files) == 1


def test_a_worker_that_is_killed_leaves_its_kernel_to_the_caller(files):
    workers = Workers(1)
    kernel = kernels.Kernel(__name__, "scaled", (X,), (("scale", 2.0),))
    result = workers.lower(kernel)
    while not workers._started:
        time.sleep(0.001)
    workers._started[0].kill()
    assert result() is None
    again = workers.lower(kernel)()
    workers.close()
    assert again is not None and kernels.read(again) is not None
    assert all(process.poll() is not None for process in workers._started)


def test_a_worker_with_other_settings_lowers_nothing(files, monkeypatch):
    monkeypatch.setattr("pallas_kernels.kept.workers.surroundings", lambda: "other")
    workers = Workers(1)
    kernel = kernels.Kernel(__name__, "scaled", (X,), (("scale", 2.0),))
    assert workers.lower(kernel)() is None
    workers.close()


def test_threads_share_the_workers_until_the_last_of_them_ends(files, monkeypatch):
    made, entered, may_leave = [], threading.Event(), threading.Event()
    monkeypatch.setattr(calls, "Workers", lambda: made.append(Workers(1)) or made[-1])

    def other() -> None:
        with lowered_by_workers():
            entered.set()
            may_leave.wait(60)

    thread = threading.Thread(target=other)
    with lowered_by_workers():
        thread.start()
        assert entered.wait(60)
    [workers] = made
    assert calls._keeping.workers is workers and not workers._closed
    may_leave.set()
    thread.join()
    assert calls._keeping.workers is None and workers._closed


def test_workers_that_another_thread_has_ended_leave_a_kernel_to_the_caller():
    workers = Workers(1)
    workers.close()
    kernel = kernels.Kernel(__name__, "scaled", (X,), (("scale", 2.0),))
    assert workers.lower(kernel)() is None
    workers.run(lambda: pytest.fail("it is closed"))


class Compiled:
    """In place of the compiler, which a machine without a GPU does not have."""

    def __init__(self, monkeypatch):
        self.loadable: list[bytes] = []
        self.compiled: list[str] = []
        monkeypatch.setattr(compiled_kernels, "_loads", self.loads)
        monkeypatch.setattr(compiled_kernels, "_compiled", self.compile)

    def loads(self, content: bytes) -> bool:
        self.loadable.append(content)
        return content.startswith(b"compiled")

    def compile(self, exported) -> bytes:
        self.compiled.append(exported.fun_name)
        return f"compiled {exported.fun_name}".encode()


def test_a_lowered_kernel_is_compiled_once_for_all_processes(files, monkeypatch):
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    compiler = Compiled(monkeypatch)
    for process in range(3):
        with lowered_by_workers():
            text_of(program_of_scaled(7.0))
        forget(monkeypatch)
        assert len(compiler.compiled) == 1 and len(compiler.loadable) == process
    assert len(files) == 2, "the lowered kernel, and the compiled one"


def test_a_compiled_kernel_that_cannot_be_loaded_is_compiled_again(files, monkeypatch):
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    compiler = Compiled(monkeypatch)
    with lowered_by_workers():
        text_of(program_of_scaled(7.0))
    files.update({name: b"damaged" for name in files if "-" in name})
    forget(monkeypatch)
    with lowered_by_workers():
        text_of(program_of_scaled(7.0))
    assert len(compiler.compiled) == 2
    assert b"damaged" not in files.values()


def test_a_kernel_that_cannot_be_compiled_alone_is_left_to_its_program(files, monkeypatch, caplog):
    """Here it is lowered for a GPU, and there is none."""
    monkeypatch.setattr(calls, "Workers", lambda: Workers(1))
    with caplog.at_level("INFO", "pallas_kernels"), lowered_by_workers():
        text = text_of(program_of_scaled(7.0))
    assert "stablehlo.multiply" in text and len(files) == 1
    assert "is compiled with its program" in caplog.text


@pytest.mark.gpu
@pytest.mark.usefixtures("compiles_anew")
def test_on_a_gpu_a_kernel_is_kept_as_it_was_compiled(monkeypatch):
    monkeypatch.setattr(calls, "_functions", {})
    files = Files()
    keep_lowered_kernels(files)
    try:
        x = jax.random.normal(jax.random.key(0), (8, 1024), jnp.bfloat16)
        addend, scale = jnp.ones((1, 8, 1024)), jnp.ones(1024, jnp.bfloat16)
        normed = lambda x: add_norm(x, addend, scale, eps=1e-6, implementation="mosaic")
        with lowered_by_workers():
            expected = jax.jit(normed).trace(x).lower().compile()(x)
        [kept_file] = [content for name, content in files.items() if "-" in name]
        assert compiled_kernels._loads(kept_file)
        assert not compiled_kernels._loads(kept_file[: len(kept_file) // 2])
        forget(monkeypatch)
        again = jax.jit(lambda x: normed(x))(x)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), expected, again))
    finally:
        keep_lowered_kernels(None)
