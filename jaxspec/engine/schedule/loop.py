"""The host loop: requests in, increments out, one transaction per step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import jax

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.schedule import ledger
from jaxspec.engine.schedule.abandoned import Abandoned
from jaxspec.engine.schedule.record import Ledger
from jaxspec.engine.schedule.stepping import Stepping
from jaxspec.engine.schedule.turn import Turn, in_turn
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.state import EngineState, occupied
from jaxspec.engine.step.waiting import StepTimeout
from jaxspec.errors import UsageError
from jaxspec.proposers.methods import HostProposer
from jaxspec.text.tokenizer import Tokenizer


class Busy(UsageError):
    """The engine has requests, so its device cannot be borrowed."""


class Loop(Stepping):
    """The live requests of one device state, run step by step. Threads take turns."""

    def __init__(
        self,
        device: Device,
        new_state: Callable[[], EngineState],
        plan: Plan,
        tokenizer: Tokenizer | None,
        proposer: HostProposer | None = None,
        adaptive: AdaptiveWidth | None = None,
    ):
        super().__init__(device, new_state, plan, tokenizer, proposer, adaptive)
        self.turn = Turn()
        self.abandoned = Abandoned()
        """Requests that the ledger may still have, and that the next call drops."""
        self.trusted = True
        """Whether the device's state and what the drafters know agree with the ledger."""
        self.closed = False
        """Whether the device's memory was given back, so that nothing can run any more."""
        self.stuck: StepTimeout | None = None
        """The error of a step that did not end, after which nothing can run; None without one."""

    @property
    def current(self) -> Ledger:
        """The ledger without requests that were abandoned."""
        gone = self.abandoned.oldest(len(self.abandoned.queue))
        return ledger.dropped(self.ledger, gone) if gone else self.ledger

    @property
    def idle(self) -> bool:
        return self.current.is_idle

    # What callers do, one at a time

    @in_turn
    def submit(self, requests: Sequence[Request], refusals: Sequence[str | None]) -> None:
        """Adds all of these requests, or none if this fails. Those with a refusal end at once."""
        self.refuse_if_closed()
        pairs = list(zip(requests, refusals, strict=True))
        waiting = ledger.submitted(self.ledger, [r for r, reason in pairs if reason is None])
        self.ledger = ledger.refused(waiting, [(r, reason) for r, reason in pairs if reason])

    @in_turn
    def step(self) -> None:
        """Runs one step of all requests."""
        self.refuse_if_closed()
        self._drop_abandoned()
        self._step_or_fail()

    @in_turn
    def take_or_step(self, of: set[int], into: deque[Increment]) -> bool:
        """Moves the increments of these requests to `into`; if there are none, runs a step first.
        Returns whether there are some now or may be later."""
        self.refuse_if_closed()
        self._drop_abandoned()
        self._take(of, into)
        if not into and not self.ledger.is_idle:
            self._step_or_fail()
            self._take(of, into)
        return bool(into) or not self.ledger.is_idle

    @in_turn
    def step_and_take(self, of: set[int], into: deque[Increment]) -> None:
        """Runs one step, and moves the increments of these requests to `into`."""
        self.refuse_if_closed()
        self._drop_abandoned()
        if not self.ledger.is_idle:
            self._step_or_fail()
        self._take(of, into)

    @in_turn
    def give_back(self, increments: Sequence[Increment]) -> None:
        """Puts back increments that did not reach their caller."""
        self.ledger = ledger.given_back(self.ledger, increments)

    @in_turn
    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests now. Each of them gets a last increment that says so."""
        self.ledger = ledger.ended(self.ledger, set(ids), "abort")
        self.drafters.release_all_but(self.ledger.running)

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running requests keep their pages."""
        self.refuse_if_closed()
        self.ledger = ledger.without_cached(self.ledger)

    @in_turn
    def close(self) -> None:
        """Drops all requests and frees the device's memory. An interrupted call can be repeated. If
        a step is stuck, the memory stays in use, because freeing it would wait for that step."""
        self.closed = True
        self.ledger = ledger.emptied(self.ledger)
        self.drafters.release_all_but(())
        if self.stuck is None:
            self.device.free()

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed; make a new one with Engine.from_pretrained")
        if self.stuck is not None:
            raise self.stuck

    def abandon(self, ids: Iterable[int]) -> None:
        """Drops requests: now or, if called inside a callback of the loop, after the step."""
        self.abandoned.add(tuple(ids))
        if not self.turn.is_mine:
            self._settle()

    @in_turn
    def _settle(self) -> None:
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        if count := len(self.abandoned.queue):
            self.ledger = ledger.dropped(self.ledger, self.abandoned.oldest(count))
            self.abandoned.forget(count)
            self.drafters.release_all_but(self.ledger.running)

    def _take(self, of: set[int], into: deque[Increment]) -> None:
        mine, rest = ledger.taken(self.ledger, of)
        into.extend(mine)
        self.ledger = rest

    def wait(self) -> None:
        """Waits until the device has run everything that was launched."""
        with nullcontext() if self.turn.is_mine else self.turn.held():
            leaves = jax.tree.leaves(self.device.state)
            jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])

    @contextmanager
    def lend_device(self) -> Iterator[Device]:
        """Lends the device of an idle loop. Its slots are emptied when it comes back."""
        with self.turn.held():
            self.refuse_if_closed()
            self._drop_abandoned()
            if not self.ledger.is_idle:
                raise Busy("the engine has requests; borrow its device when they have ended")
            trusted, self.trusted = self.trusted, False
            if not trusted:
                self._begin_anew()
            self.read_results()  # of a step that was launched before the last reply was read
            self.ledger = ledger.without_cached(self.ledger)  # the borrower may write to any page
            yield self.device
            self.device.state = occupied(self.device.state, batch=0, context=0, limit=0)
            self.trusted = True

    # A step

    def _step_or_fail(self) -> None:
        """Runs one step as a transaction: all of it takes effect, or nothing.

        Whatever is raised, the ledger is that of before or after a transition. The device is
        trusted only if the last step ended well; otherwise the next step makes new pools.
        """
        self.tried = ()
        trusted, self.trusted = self.trusted, False
        try:
            if not trusted:
                self._begin_anew()
            self._observed_step()
        except StepTimeout as error:
            self.stuck, self.ledger = error, ledger.all_failed(self.ledger, _reason(error))
        except Exception as error:
            if self.ledger.is_idle:
                raise
            self.ledger = ledger.failed(self.ledger, self.tried, _reason(error))
        else:
            self.trusted = True

    def _observed_step(self) -> None:
        for observer in tuple(self.device.observers):
            observer.step_begins(len(self.ledger.running))
        self._step()
        for observer in tuple(self.device.observers):
            observer.step_ends()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
