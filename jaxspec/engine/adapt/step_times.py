"""How long steps take on the device, found from when their results come."""

WAITED = 2e-4
"""Seconds after which the host has waited for a result, and did not find it there already."""


class StepTimes:
    """Times programs without stopping for them. If the host waited for two results in a row, and
    the second program was launched before the first result came, the time between the results is
    what the second program took."""

    def __init__(self) -> None:
        self.began: float | None = None
        """When the program began whose result is read next; None if that is not known."""

    def took(self, asked: float, came: float, another: bool) -> float | None:
        """Seconds that a program took; None if that is not known. The host asked for its result and
        got it at these times, and `another` program had been launched then."""
        waited, began = came - asked > WAITED, self.began
        self.began = came if waited and another else None
        return came - began if waited and began is not None else None
