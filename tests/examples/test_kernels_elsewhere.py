"""examples/kernels_elsewhere.py: the interpreted kernel agrees with plain jnp."""

import jax.numpy as jnp
from example_module import example

kernels_elsewhere = example("kernels_elsewhere")


def test_the_kernel_agrees(capsys):
    assert kernels_elsewhere.main() == 0
    assert "portable, interpreted on a CPU" in capsys.readouterr().out


def test_wrong_pages_are_noticed():
    """The comparison would fail if attention read the pages of the other request."""
    attend = kernels_elsewhere.interpreted
    swapped = lambda *arrays: attend(*arrays[:3], jnp.flip(arrays[3], axis=0), arrays[4])
    given = kernels_elsewhere.PAGE_TABLE, kernels_elsewhere.PROMPTS, kernels_elsewhere.LENGTHS
    assert kernels_elsewhere.largest_error(swapped, *given, new_tokens=0) > 0.1


def test_it_imports_nothing_of_jaxspec():
    assert not any(name.startswith("jaxspec") for name in dir(kernels_elsewhere))
