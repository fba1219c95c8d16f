"""Lowered kernels that are kept for the next process."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import kept


class Files(dict):
    """Kept in memory."""

    def read(self, name):
        return self.get(name)

    def write(self, name, content):
        self[name] = content


@pytest.fixture
def files(monkeypatch):
    """As on a GPU. What stands for a kernel is lowered for one, and never run."""
    monkeypatch.setattr(kept, "_on_gpu", lambda: True)
    monkeypatch.setattr(kept, "_lowered_here", {})
    files = Files()
    kept.keep_lowered_kernels(files)
    yield files
    kept.keep_lowered_kernels(None)


class Kernel:
    """Counts how often it is traced."""

    def __init__(self):
        self.traced = 0
        self.call = kept.kept(static_argnames=("scale", "interpret"))(self.kernel)

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
    monkeypatch.setattr(kept, "_lowered_here", {})
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
    monkeypatch.setattr(kept, "_sources", lambda: "edited")
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
    kept.keep_lowered_kernels(None)
    assert kernel.call(jnp.ones(4), jnp.ones(4), scale=2.0)["sum"].tolist() == [3.0] * 4
    assert not files
