"""Seconds that this process spent compiling, so that rates can leave them out."""

import jax


class CompileClock:
    """Counts the seconds spent compiling since the clock was made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
