"""A clock that rings after so many questions, and what is still done after that."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ticking import Ticking


@pytest.fixture
def ticking(monkeypatch) -> Callable[..., SimpleNamespace]:
    """Gives an attack's module a clock that rings after so many questions, and counts its work.

    Returns the clock, and how often each of the functions was called before and after it rang.
    """

    def make(module: Any, ticks: float, *work: tuple[Any, str]) -> SimpleNamespace:
        clock = Ticking(ticks)
        seen = SimpleNamespace(clock=clock, before=0, after=0)
        monkeypatch.setattr(module, "Clock", lambda seconds: clock)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **options: Any) -> Any:
                seen.before += not clock.rang
                seen.after += clock.rang
                return call(*args, **options)

            return count

        for owner, name in work:
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
        return seen

    return make
