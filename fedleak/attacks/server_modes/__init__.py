"""What a malicious server changes of the model that it sends: one file per mode.

A mode is a frozen dataclass of its settings with a `kind`, and overrides what it has to do with:
whom a round is about (`target`), what clients are sent (`broadcast`), the target's own part of a
sum (`isolated`), why it cannot work (`obstacle`), and a sentence on what the server changes
(`changes`), which every table and report shows. `[server] mode = "..."` of an experiment file names
it; its settings are further keys of that table, with bounds as `Annotated[float, Field(gt=0)]`.

A mode sees what any server has: the global model, texts that no client has, and a random stream of
the seed, which is the same each time a round is made. So a resumed round sends the same. It returns
the parameters that it changes, and leaves the model that it is given alone. What is captured in
such a round is attacked at the model that its target was sent; without a target all clients are
sent the same, and each update, or the sum, is captured. The honest model stays in `models/` of the
run directory, and the one that was sent stands beside it. A mode knows neither Flower nor the run
directory. An attack that reads what a mode has planted may import the mode's file. `fedleak list`
prints the first line of the docstring, and `tests/attacks/server_modes/test_contract.py` picks up
every mode that is here.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from fedleak.models import LanguageModel
from fedleak.training.observation import Example, Sight
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import FedleakError
from fedleak.util.plugins import discover, no_dataclass_of


@dataclass(frozen=True, kw_only=True)
class ModeSetting:
    """What is known to a mode before anything is trained: enough to refuse it early.

    Attributes:
        sees: What the server sees: each client's update, or the sum of a round's.
        local: How clients train, their defenses aside.
        sent: Names of the parameters that clients send.
    """

    sees: Sight
    local: LocalTraining
    sent: frozenset[str]


class ServerMode:
    """What every mode has; by itself it changes nothing.

    Attributes:
        kind: Its name in experiment files.
    """

    kind: ClassVar[str]

    def changes(self) -> str:
        """Returns what it changes, and on whom: the end of a sentence that begins "the server"."""
        raise NotImplementedError

    def obstacle(self, setting: ModeSetting, model: LanguageModel) -> str | None:
        """Returns why it cannot work, and what to do; None if it can.

        Args:
            setting: What is trained, and what the server sees.
            model: With names and shapes, but without weights.
        """
        return None

    def target(self, clients: Sequence[int], round: int, *, rng: torch.Generator) -> int | None:
        """Returns the client that a round is about; None: it is about all of them.

        With a target, only its update is captured, or its part of a sum.

        Args:
            clients: Those that train in the round, in order.
            round: From 1.
            rng: The random stream of the round.
        """
        return None

    def broadcast(
        self,
        model: LanguageModel,
        *,
        targeted: bool,
        public: Sequence[Example],
        rng: torch.Generator,
    ) -> Mapping[str, Tensor]:
        """Returns the parameters that it changes, by name; all others are sent as they are.

        Args:
            model: The global model of the round. It has to be left as it is.
            targeted: Whether the model is for the target, or for all clients if there is no target;
                if not, it is for the other clients.
            public: Texts that no client has.
            rng: The random stream of the round; both calls of a round have the same.
        """
        return {}

    def isolated(self, names: Iterable[str], model: LanguageModel) -> frozenset[str] | None:
        """Returns the parameters of a sum to which nobody but the target contributes.

        The capture of a sum holds these alone, scaled to the target's update. None: the mode takes
        nothing out of sums, which are captured as they are.

        Args:
            names: Names of the parameters that clients send.
            model: With names and shapes; its weights may be missing.
        """
        return None


def changed_state(
    state: Mapping[str, Tensor], changes: Mapping[str, Tensor], kind: str
) -> dict[str, Tensor]:
    """Returns a model as it is sent.

    Args:
        state: The global model.
        changes: What `broadcast` returned.
        kind: Of the mode, for messages.

    Raises:
        FedleakError: It changes a name, a shape or a type.
    """
    for name, value in changes.items():
        if name not in state:
            raise FedleakError(f"server.mode = {kind!r} sends {name!r}, which nobody trains")
        wanted = state[name]
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            raise FedleakError(
                f"server.mode = {kind!r} sends {name!r} as {value.dtype} {tuple(value.shape)}, and "
                f"the model has {wanted.dtype} {tuple(wanted.shape)}"
            )
    return {**state, **changes}


def flaw(cls: type) -> str | None:
    """Returns why a class is no mode, and what it lacks; None if it is one."""
    return no_dataclass_of(ServerMode, cls)


@cache
def kinds() -> Mapping[str, type[ServerMode]]:
    """Returns the modes, fedleak's own and those of others, by kind."""
    return discover(sys.modules[__name__]).kinds
