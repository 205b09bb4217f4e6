"""Time that passes when a test says so."""


class HeldTime:
    """Stands in for ``time.perf_counter``."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
