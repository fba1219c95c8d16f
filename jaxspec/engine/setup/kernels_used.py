"""What runs the ops of an engine's models, kept with its programs."""

import pathlib
import pickle

from jaxspec.engine.plan.kernels import kernel_uses
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.programs.fingerprint import fingerprint
from jaxspec.engine.programs.store import ProgramStore
from jaxspec.engine.step.io import Models
from jaxspec.models.kernels import KernelUse
from pallas_kernels.kept import hash_of_sources

RULES = hash_of_sources(pathlib.Path(__file__).resolve().parents[1], ["plan"])
"""A hash of the sources of `kernel_uses`, which are not among those of programs, as imported."""


def kept_kernel_uses(
    models: Models, plan: Plan, store: ProgramStore | None
) -> tuple[KernelUse, ...]:
    """The same as `kernel_uses`, whose rules import Mosaic on a GPU. That takes half a second, and
    a process that loads all its programs can do without."""
    decided_by = {"plan": plan, "rules": RULES}
    name = None if store is None else fingerprint("kernel_uses", models, decided_by, ())
    if store is None or name is None:
        return kernel_uses(models, plan)
    content = store.files.read(name)
    if content is not None:
        return pickle.loads(content)
    uses = kernel_uses(models, plan)
    store.files.write(name, pickle.dumps(uses))
    return uses
