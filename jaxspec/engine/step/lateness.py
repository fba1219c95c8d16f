"""Devices that wait for another one in vain.

A kernel in which devices wait for each other gives up after `PATIENCE_S` seconds, and its result is
then NaN. A step makes a negative token of logits that are NaN. If the host sees one, it looks
whether a device was late.
"""

from typing import Any

import jax
import numpy as np

from jaxspec.engine.step.device import Device
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.waiting import StepTimeout
from pallas_kernels.exchange import PATIENCE_S, Inboxes, late_device


class ExchangingDevice(Device):
    """Devices whose kernels wait for each other."""

    def fetched[Results](self, results: Results) -> Results:
        found = super().fetched(results)
        if has_no_token(found):
            self._in_time(lambda: refuse_lateness(self.state))
        return found


def refuse_lateness(state: EngineState) -> None:
    """Raises StepTimeout if a device has waited in vain for another one."""
    is_inboxes = lambda part: isinstance(part, Inboxes)
    for part in jax.tree.leaves(state, is_leaf=is_inboxes):
        if is_inboxes(part) and (late := late_device(np.asarray(part.late))) is not None:
            raise StepTimeout(
                f"device {late} sent nothing to another one within {PATIENCE_S} s; this engine "
                "cannot go on, so end the process"
            )


def has_no_token(results: Any) -> bool:
    """Whether there is a number below zero among the integers, as where a token is none."""
    integers = [x for x in jax.tree.leaves(results) if np.issubdtype(x.dtype, np.signedinteger)]
    return any(bool((x < 0).any()) for x in integers)
