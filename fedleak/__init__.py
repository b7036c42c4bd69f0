"""What can a federated-learning server read out of the updates that its clients send?

The public functions are `attack`, `score`, `run` and `read_results`; `docs/own-update.md` shows
them. They are imported when they are first used, so that `import fedleak` takes no time.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from fedleak.util.versions import VERSION

if TYPE_CHECKING:
    from fedleak.audit.answer_scores import Scored
    from fedleak.config.sent_update import SentUpdate
    from fedleak.flower.experiments import run
    from fedleak.models.loading import builtin_model
    from fedleak.running.own_update.attack import AttackResult, attack
    from fedleak.running.own_update.score import score
    from fedleak.running.results import Results, read_results
    from fedleak.store.records import LeakageRow, MembershipRow
    from fedleak.store.summaries import RunSummary
    from fedleak.util.errors import ConfigError, FedleakError

_MODULES = {
    "AttackResult": "running.own_update.attack",
    "ConfigError": "util.errors",
    "FedleakError": "util.errors",
    "LeakageRow": "store.records",
    "MembershipRow": "store.records",
    "Results": "running.results",
    "RunSummary": "store.summaries",
    "Scored": "audit.answer_scores",
    "SentUpdate": "config.sent_update",
    "attack": "running.own_update.attack",
    "builtin_model": "models.loading",
    "read_results": "running.results",
    "run": "flower.experiments",
    "score": "running.own_update.score",
}
"""Where each public name is defined."""

__all__ = [
    "AttackResult",
    "ConfigError",
    "FedleakError",
    "LeakageRow",
    "MembershipRow",
    "Results",
    "RunSummary",
    "Scored",
    "SentUpdate",
    "__version__",
    "attack",
    "builtin_model",
    "read_results",
    "run",
    "score",
]

__version__ = VERSION

# On some processors the order of a sum depends on where numbers lie in memory. This setting of MKL
# prevents that; it costs about 3 %. MKL reads it once, when it is first used.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Log messages are shown only if the program that imports fedleak adds a handler.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Imports the public functions when one of them is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedleak.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
