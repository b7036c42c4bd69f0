"""A clock that rings after so many questions."""

from fedleak.attacks.clock import Clock


class Ticking(Clock):
    """Rings after so many questions; its parts are itself."""

    def __init__(self, ticks: float) -> None:
        super().__init__(None)
        self.left = ticks

    def up(self, step: float = 0.0) -> bool:
        self.left -= 1
        self.rang |= self.left < 0
        return self.rang

    def part(self, parts: int) -> Clock:
        return self
