"""How GPUs that write into each other's memory wait for each other, in all orders."""

import dataclasses

import pytest
from exchange_model import (
    ROW_BYTES,
    Await,
    Flag,
    Model,
    Store,
    Wait,
    Wrong,
    numbered_programs,
    programs,
)

from pallas_kernels.exchange import shots
from pallas_kernels.exchange.inboxes import PATIENCE_S, Layout

CALLS = [(2, [1, 1, 1, 1, 1]), (2, [2, 1, 2]), (2, [1, 2, 1, 1]), (3, [1, 1, 1])]
"""GPUs, and the rows of each call."""


class OneTurn(Layout):
    def message(self, number, sender):
        return super().message(0, sender)


def layout_of(devices: int, calls: list[int], kind: type[Layout] = Layout) -> Layout:
    return kind(devices, max(calls) * ROW_BYTES)


@pytest.mark.parametrize(("devices", "calls"), CALLS)
def test_every_order_ends_with_the_right_sums(monkeypatch, devices, calls):
    model = Model(programs(monkeypatch, layout_of(devices, calls), calls))
    found = list(model.final_states())
    assert found and all(model.finished(state, d) for state in found for d in range(devices))


MIXED_CALLS = [
    (2, [2, 1, 2], [2, 2, 2]),
    (3, [1, 3, 1], [2, 2, 2]),
    (3, [3, 3], [2, 2]),
    (2, [2, 2, 2, 2], [1, 2, 1, 2]),
    (2, [2, 2, 1, 2], [2, 1, 1, 2]),
    (3, [1, 2, 1], [1, 2, 1]),
]
"""GPUs, the rows of each call, and its shots."""


@pytest.mark.parametrize(("devices", "calls", "of_calls"), MIXED_CALLS)
def test_calls_in_one_and_in_two_shots_may_follow_each_other(monkeypatch, devices, calls, of_calls):
    model = Model(programs(monkeypatch, layout_of(devices, calls), calls, of_calls))
    found = list(model.final_states())
    assert found and all(model.finished(state, d) for state in found for d in range(devices))


@pytest.mark.parametrize(("devices", "calls"), CALLS[:2])
class TestOfAPeerThatStops:
    def test_whoever_does_not_end_waits_for_it(self, monkeypatch, devices, calls):
        """And waits end by the clock."""
        model = Model(programs(monkeypatch, layout_of(devices, calls), calls), stopped=1)
        ends = [state for state in model.final_states() if not model.finished(state, 0)]
        assert ends
        for state in ends:
            blocks = zip(model.programs[0][state.calls[0]], state.places[0])
            left = [program[done] for program, done in blocks if done < len(program)]
            assert all(isinstance(one, Wait) and one.sender == 1 for one in left)


def test_whoever_waits_for_a_peer_that_stops_is_told_about_it_by_owners_first(monkeypatch):
    """Others wait longer for an owner than an owner waits for a GPU that has stopped."""
    calls = [3, 3]
    model = Model(programs(monkeypatch, layout_of(3, calls), calls, [2, 2]), stopped=1)
    ends = [state for state in model.final_states() if not model.finished(state, 0)]
    assert ends and shots.PATIENCE_WITH_OWNER_S >= 2 * PATIENCE_S
    for state in ends:
        blocks = enumerate(zip(model.programs[0][state.calls[0]], state.places[0]))
        left = {block: program[done] for block, (program, done) in blocks if done < len(program)}
        for block, one in left.items():
            assert isinstance(one, Wait) and one.sender == (1 if block == 0 else block)


class TestWhatEachPartIsFor:
    """A protocol without it goes wrong in some order."""

    DEVICES, CALLS = 2, [1, 1, 1, 1]

    def programs(self, monkeypatch, kind: type[Layout] = Layout) -> list:
        return programs(monkeypatch, layout_of(self.DEVICES, self.CALLS, kind), self.CALLS)

    def changed(self, monkeypatch, change) -> list:
        given = self.programs(monkeypatch)
        return [[[change(block) for block in call] for call in device] for device in given]

    def reads_wrong(self, model: Model) -> None:
        with pytest.raises(Wrong):
            list(model.final_states())

    def stops(self, model: Model) -> None:
        assert not all(model.finished(s, d) for s in model.final_states() for d in range(2))

    def test_two_turns(self, monkeypatch):
        self.reads_wrong(Model(self.programs(monkeypatch, OneTurn)))

    def test_release(self, monkeypatch):
        self.reads_wrong(Model(self.programs(monkeypatch), held_back=False))

    def test_the_flag_after_the_rows(self, monkeypatch):
        early = lambda block: tuple(sorted(block, key=lambda one: not isinstance(one, Flag)))
        self.reads_wrong(Model(self.changed(monkeypatch, early)))

    def test_the_wait(self, monkeypatch):
        without = lambda block: tuple(one for one in block if not isinstance(one, Wait))
        self.reads_wrong(Model(self.changed(monkeypatch, without)))

    def test_numbers_of_calls(self, monkeypatch):
        """Flags that only say that something has arrived."""
        set_to_one = lambda one: (
            dataclasses.replace(one, value=1)
            if isinstance(one, Flag)
            else dataclasses.replace(one, number=1)
            if isinstance(one, Wait)
            else one
        )
        self.reads_wrong(
            Model(self.changed(monkeypatch, lambda block: tuple(map(set_to_one, block))))
        )

    def test_at_least(self, monkeypatch):
        """A GPU that is ahead has set its flag to the next number already."""
        self.stops(Model(self.programs(monkeypatch), equal=True))

    def test_flags_that_nobody_fills(self, monkeypatch):
        """jax fills semaphores with zeros before every call: a flag that came early is lost."""
        self.stops(Model(self.programs(monkeypatch), filled=True))


NUMBERED_CALLS = [(2, [1, 1]), (2, [2, 1]), (3, [1])]
"""GPUs, and the groups of each tile in each call of a chain."""


class OneNumberedTurn(Layout):
    def numbered_message(self, number, sender):
        return super().numbered_message(0, sender)


class TestNumberedWords:
    def programs(self, monkeypatch, devices, calls, kind: type[Layout] = Layout) -> list:
        return numbered_programs(monkeypatch, kind(devices, 16 * ROW_BYTES * max(calls)), calls)

    @pytest.mark.parametrize(("devices", "calls"), NUMBERED_CALLS)
    def test_every_order_ends_with_the_right_sums(self, monkeypatch, devices, calls):
        model = Model(self.programs(monkeypatch, devices, calls), held_back=False)
        found = list(model.final_states())
        assert found and all(model.finished(state, d) for state in found for d in range(devices))

    def test_whoever_does_not_end_waits_for_a_peer_that_stops(self, monkeypatch):
        model = Model(self.programs(monkeypatch, 2, [1, 1]), stopped=1)
        ends = [state for state in model.final_states() if not model.finished(state, 0)]
        assert ends
        for state in ends:
            blocks = zip(model.programs[0][state.calls[0]], state.places[0])
            left = [program[done] for program, done in blocks if done < len(program)]
            assert all(isinstance(one, Await) and one.wanted[1] == 1 for one in left)

    def test_two_turns_are_needed(self, monkeypatch):
        """With one, a GPU that is ahead writes over what its peer has not read, which then waits
        for ever."""
        model = Model(self.programs(monkeypatch, 2, [1, 1], OneNumberedTurn))
        assert not all(model.finished(s, d) for s in model.final_states() for d in range(2))

    def test_numbers_are_needed(self, monkeypatch):
        """Without, what arrived for the exchange two before is taken for the new words."""
        with_place = lambda one: (
            dataclasses.replace(one, value=(one.value[0] % 2, one.value[1]))
            if isinstance(one, Store)
            else dataclasses.replace(one, wanted=(one.wanted[0] % 2, one.wanted[1]))
        )
        given = self.programs(monkeypatch, 2, [1, 1])
        same = [[[tuple(map(with_place, b)) for b in call] for call in device] for device in given]
        model = Model(same)
        ahead = lambda state: abs(state.calls[0] - state.calls[1]) > 1
        assert any(ahead(state) for state in all_states(model))
        assert not any(ahead(state) for state in all_states(Model(given)))


def all_states(model: Model) -> set:
    seen, open_states = set(), [model.first()]
    while open_states:
        state = open_states.pop()
        if state not in seen:
            seen.add(state)
            open_states += model.after(state)
    return seen


def test_the_kernel_stores_each_row_once_for_every_gpu(monkeypatch):
    layout = layout_of(3, [2])
    for device, [blocks] in enumerate(programs(monkeypatch, layout, [2])):
        stored = [one for block in blocks for one in block if type(one) is Store]
        wanted = {(to, (1, device, row, 1)) for to in range(3) for row in range(2)}
        assert len(stored) == len(wanted) == len({(s.receiver, s.place) for s in stored})
        assert {(s.receiver, s.value) for s in stored} == wanted


def test_in_two_shots_a_row_goes_to_its_owner_and_its_sum_to_every_gpu(monkeypatch):
    layout = layout_of(3, [4])
    for device, [blocks] in enumerate(programs(monkeypatch, layout, [4], [2])):
        stored = [one for block in blocks for one in block if type(one) is Store]
        owned = [row for row in range(4) if row % 3 == device]
        sent = [(row % 3, (1, device, row, 1)) for row in range(4)]
        sums = [(to, (1, device, row, 2)) for to in range(3) for row in owned]
        assert sorted((s.receiver, s.value) for s in stored) == sorted(sent + sums)


@pytest.mark.parametrize("number", [1, 2**31 - 1, -(2**31), -1, 0])
def test_calls_next_to_each_other_have_two_turns_also_when_their_numbers_overflow(number):
    layout = Layout(2, 64)
    following = (number + 1 + 2**31) % 2**32 - 2**31
    assert {layout.message(n, 0) for n in (number, following)} == {
        layout.message(0, 0),
        layout.message(1, 0),
    }


def test_nothing_in_an_inbox_overlaps():
    layout = Layout(4, 64)
    flags = [layout.flag(sender, block) for sender in range(4) for block in (0, 1, 126, 127)]
    messages = [layout.message(turn, sender) for turn in (0, 1) for sender in range(4)]
    assert len(set(flags)) == 16 and max(flags) + 4 <= min(messages)
    assert sorted(messages) == [min(messages) + 64 * i for i in range(8)]
    numbered = [layout.numbered_message(turn, sender) for turn in (0, 1) for sender in range(4)]
    assert sorted(numbered) == [max(messages) + 64 + 16 * i for i in range(8)]
    assert layout.size == max(numbered) + 16
