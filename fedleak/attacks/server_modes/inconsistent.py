"""Inconsistent models under a secure sum (Pasquini et al. 2022, "Eluding Secure Aggregation").

All clients but the target are sent a model whose gradients vanish. So the sum is the target's
update, and every passive attack works on it as if nothing were summed. Departs from the paper,
whose gradients vanish behind dead ReLUs: here all that is behind the layers is zero, or both
factors of every adapter are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks.server_modes import ModeSetting, ServerMode
from fedleak.models import LanguageModel
from fedleak.models.family import LORA_A, LORA_B
from fedleak.training.observation import Example


@dataclass(frozen=True)
class Inconsistent(ServerMode):
    """Sends all but one client a model without gradients, so that a sum is that client's update.

    Attributes:
        targets: The clients whose updates it is after: those that train in a round take turns.
            None: any client of the round, drawn by the seed.
        left: The share that is left of what is otherwise zero. It hides from a detector of zeros,
            and leaves the others' updates in the sum, at about this share of their size.
    """

    kind: ClassVar[str] = "inconsistent"
    targets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    left: Annotated[float, Field(ge=0, le=1)] = 0.0

    def changes(self) -> str:
        """Returns what the other clients are sent."""
        size = f"are {self.left:g} times as large" if self.left else "are zero"
        return (
            "sends every client but one a model whose gradients vanish (both factors of adapters, "
            f"or all that is behind the layers, {size}), so that the secure sum is the update of "
            "that one client"
        )

    def obstacle(self, setting: ModeSetting, model: LanguageModel) -> str | None:
        """Returns that nothing is summed, or that no client's part of the sum can be separated."""
        if setting.sees != "sum":
            return (
                f"the server sees {setting.sees!r}, and this mode takes one client's update out of "
                "a sum: add the defense secure_sum, or leave the mode out"
            )
        if not self.isolated(setting.sent, model):
            return (
                "clients send no parameter whose gradient it can make vanish: let them send more "
                "than the classifier (update.share, model.lora)"
            )
        if setting.local.recipe.weight_decay and not _adapters(setting.sent):
            return (
                "client.weight_decay moves the weights of all clients, also where no gradient is: "
                "set it to 0, or train adapters (model.lora), which are zero at the others"
            )
        return None

    def target(self, clients: Sequence[int], round: int, *, rng: torch.Generator) -> int | None:
        """Returns the client whose update is left in the sum."""
        if self.targets is None:
            return clients[int(torch.randint(len(clients), (), generator=rng))]
        training = [client for client in self.targets if client in clients]
        return training[(round - 1) % len(training)] if training else None

    def broadcast(
        self,
        model: LanguageModel,
        *,
        targeted: bool,
        public: Sequence[Example],
        rng: torch.Generator,
    ) -> Mapping[str, Tensor]:
        """Returns zeros, or little, for all but the target, which is sent the model as it is."""
        if targeted:
            return {}
        parameters = model.parameters()
        return {name: self.left * parameters[name] for name in _zeroed(parameters, model)}

    def isolated(self, names: Iterable[str], model: LanguageModel) -> frozenset[str]:
        """Returns all but those that multiply or shift a value that is not zero at other clients.

        With adapters that is the classifier, which is trained beside them and sees the frozen
        model's outputs. Without, it is the classifier's bias: logits depend on nothing else.
        """
        names = frozenset(names)
        classifier = model.family.classifier
        return names - frozenset(classifier if _adapters(names) else classifier[1:])


def _zeroed(names: Iterable[str], model: LanguageModel) -> list[str]:
    """Returns what is zero in the model of the other clients.

    Logits are a product of the output layer and of what a pooler or a last norm gives it. With both
    zero neither has a gradient, and nothing below the output layer has. A tied output layer is the
    word embedding.
    """
    if adapters := _adapters(names):
        return adapters
    family = model.family
    inner = (*family.embeddings, f"{family.layers}.")
    behind = [name for name in names if not name.startswith(inner)]
    return [*behind, family.word_embedding] if model.tied else behind


def _adapters(names: Iterable[str]) -> list[str]:
    """Returns the factors A and B of adapters."""
    return [name for name in names if name.endswith((LORA_A, LORA_B))]
