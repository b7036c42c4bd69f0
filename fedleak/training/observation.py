"""All that an attack may see: one client's update, and the facts the attacker was granted.

A fact that was not granted is `None`. An attack can know nothing but these fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from torch import Tensor

from fedleak.training.recipe import Recipe

Sight = Literal["updates", "sum", "models"]
"""What an attacker sees: each client's update, the sum of a round's updates, or only the models
that the server publishes."""


class UpdateKind(StrEnum):
    """What the tensors of an update are."""

    GRADIENT = "gradient"
    """The gradient of the client's mean loss at the broadcast weights (FedSGD)."""
    DELTA = "delta"
    """The client's weights after local training minus the broadcast weights (FedAvg)."""


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sent.

    Attributes:
        kind: Gradient or delta.
        tensors: By parameter name, as the model's `named_parameters` names them. A parameter
            that was not shared is absent, not zero.
        num_examples: The aggregation weight that the client reported, so the attacker has it.
    """

    kind: UpdateKind
    tensors: Mapping[str, Tensor]
    num_examples: int

    def changed(self, change: Callable[[Tensor], Tensor]) -> "ClientUpdate":
        """Returns the update with each of its tensors changed, one after the other."""
        return replace(self, tensors={name: change(value) for name, value in self.tensors.items()})


class Example(NamedTuple):
    """A text as clients feed it to the model.

    Attributes:
        ids: Its tokens, special ones included.
        label: Its class; None in next-token training.
    """

    ids: tuple[int, ...]
    label: int | None


@dataclass(frozen=True)
class Candidates:
    """The texts that a membership attack is asked about.

    Attributes:
        listed: Some were in the batch and some were not, in a random order.
        public: Texts of the same kind that anybody has, and no client.
    """

    listed: tuple[Example, ...]
    public: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Facts that the attacker holds beside the update; `None` is a fact not granted.

    Attributes:
        learning_rate, local_steps, dropout: The server's own settings, so always known to it. A
            learning rate that changes within the round is the mean over the steps.
        batch_size: Examples in one step of the client.
        labels: The class of each example, in the order of `lengths`.
        lengths: Tokens in each example, special tokens included, longest first.
        noise_scale: Standard deviation of the noise that the client added to each number.
        local_epochs: Passes over its data that the client makes; the server's own setting, too.
        recipe: How the client steps; the server's own setting, too. None: by plain SGD.
        candidates: What an attack on membership is asked about.
        server_mode: The kind of the malicious server's mode; None: the server was honest.
        own_head: The clients' head is their own, and the model's is not it; None: it is.
    """

    learning_rate: float | None = None
    local_steps: int | None = None
    dropout: bool | None = None
    batch_size: int | None = None
    labels: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    noise_scale: float | None = None
    local_epochs: int | None = None
    recipe: Recipe | None = None
    candidates: Candidates | None = None
    server_mode: str | None = None
    own_head: bool | None = None

    @property
    def adds_up(self) -> bool:
        """Whether an update is a sum of gradients; after Adam it is not."""
        return self.recipe is None or self.recipe.adds_up

    def granted(self) -> tuple[str, ...]:
        """Returns the names of the facts that are known."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)


GRANTABLE = frozenset({"batch_size", "labels", "lengths", "noise_scale"})
"""Facts that the server does not set itself: a threat model grants them or not."""

QUESTIONS = frozenset({"candidates"})
"""Facts that are an attack's question: this attack always has them, and no other attack has."""


@dataclass(frozen=True)
class ThreatModel:
    """The facts granted to the attacker beyond what the protocol tells the server anyway."""

    knows: frozenset[str] = frozenset()

    def grant(self, server: Knowledge, private: Knowledge) -> Knowledge:
        """Returns the knowledge of the server with those `private` facts that are granted."""
        return replace(server, **{name: getattr(private, name) for name in sorted(self.knows)})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One client's update in one round as the server received it, and what the attacker knows."""

    round: int
    client: int
    update: ClientUpdate
    knowledge: Knowledge
