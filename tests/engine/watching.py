"""An observer that notes which programs an engine runs."""

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.observer import StepObserver
from jaxspec.engine.step.steps import decode_step
from jaxspec.proposers.lookup import Lookup


def name_of(engine: Engine, step, static: dict) -> str:
    """The step's name. For a decode step it says who drafts: plain, lookup or drafter."""
    if step is not decode_step:
        return step.__name__
    if static["drafting"] is None:
        return "plain"
    proposer = engine.loop.device.models.proposers[static["drafting"].proposer]
    return "lookup" if isinstance(proposer, Lookup) else "drafter"


class Watcher(StepObserver):
    """Keeps the names of the programs that ran, with the number of unread steps at each launch."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.ran: list[str] = []
        self.unread: list[tuple[str, int]] = []

    def program(self, step, inputs, static):
        name = name_of(self.engine, step, static)
        self.ran.append(name)
        if name not in ("admit_step", "prefill_step"):
            self.unread.append((name, len(self.engine.loop.ledger.launched)))


class SlotsTaken(StepObserver):
    """The slots in which requests ran."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.slots: set[int] = set()

    def step_begins(self, running):
        self.slots |= {one.slot for one in self.engine.loop.ledger.running.values()}


class Drafted(StepObserver):
    """Widths of drafts and numbers of verified tokens of the steps that draft."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int | None]] = set()

    def program(self, step, inputs, static) -> None:
        if (drafting := static.get("drafting")) is not None:
            self.seen.add((step.__name__, drafting.width, drafting.num_tokens))


def watch(engine: Engine) -> Watcher:
    """Watches the engine from now on."""
    watcher = Watcher(engine)
    engine.loop.device.observers.append(watcher)
    return watcher
