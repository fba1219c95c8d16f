"""How a process ends while a step still runs."""

import subprocess
import sys

LEAVES = """
import jax, jax.numpy as jnp
from jaxspec.engine.step.device import begin_copies

slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x))
x = jnp.ones((700, 700))
slow(x).block_until_ready()
result = slow(x)
begin_copies([result])
print("leaves", result.is_ready())
"""


def test_a_process_may_end_while_a_result_is_copied():
    """A copy that had begun would find no interpreter, and end the process with SIGABRT."""
    run = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("leaves False", 0), run.stderr
