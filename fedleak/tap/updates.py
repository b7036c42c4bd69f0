"""The updates in the folder of a tap, checked against the model that was trained.

Nothing that a client sent is trusted: a reply whose names, shapes, types or numbers do not fit the
model's parameters is left out and reported.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak import data
from fedleak.config.loading import parse
from fedleak.config.sent_update import SentUpdate
from fedleak.config.tables import MOST_EXAMPLES
from fedleak.models import CLASSIFICATION, ModelSpec, loading
from fedleak.models.parameter_names import matched
from fedleak.store.files import naming
from fedleak.tap.about import About
from fedleak.tap.folder import KeptArrays, Tapped, TappedMessage
from fedleak.training.observation import UpdateKind
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.finite import all_finite
from fedleak.util.plain_files import content
from fedleak.util.sanitise import printable

_SECURE_AGGREGATION = "secaggplus_configs"
"""The record by which messages of Flower's SecAgg+ are known."""

_LONGEST = 300


class RefusedError(FedleakError):
    """A reply that is not what the model's clients send."""


@dataclass(frozen=True)
class Update:
    """One update of a tap.

    Attributes:
        message: The reply; of a sum, the reply with most examples.
        nodes: The nodes that sent it: one, or all of a sum.
        num_examples: Examples that the client reported, or all clients together.
        names: Names of the parameters in it.
        sent: What the server knows of how it was made.
        tensors: Reads the tensors.
        summed: Whether it is a sum, even of one client.
    """

    message: TappedMessage
    nodes: tuple[int, ...]
    num_examples: int
    names: frozenset[str]
    sent: SentUpdate
    tensors: Callable[[], dict[str, Tensor]]
    summed: bool = False

    @property
    def round(self) -> int:
        """The round of the strategy."""
        return self.message.round


class Tap:
    """Reads the updates of a tap, for the model that was trained.

    Args:
        tapped: The folder.
        messages: The messages in it.
        about: What the messages do not say.
    """

    def __init__(self, tapped: Tapped, messages: Sequence[TappedMessage], about: About) -> None:
        self.tapped, self.messages, self.about = tapped, messages, about
        self.kind = UpdateKind.GRADIENT if about.reply.payload == "gradient" else UpdateKind.DELTA
        self._sent: dict[int, TappedMessage] = {}  # what most nodes got: the first of a round
        self._sent_to_node: dict[tuple[int, int], TappedMessage] = {}
        for message in messages:
            if message.way == "sent" and message.arrays:
                self._sent.setdefault(message.round, message)
                self._sent_to_node.setdefault((message.round, message.node), message)
        self._matched = cache(self._match)  # most messages have the same names
        self.labels = 2
        self.model = loading.outline(self.spec)
        if rows := self._classes():
            self.labels = rows
            self.model = loading.outline(self.spec)

    # --- the model --------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """What the model is loaded from."""
        model = self.about.model.model_dump(mode="json")
        table = {"name": "tap", "model": model, "data": {"name": "tap"}}
        return parse(table).model_spec(self.labels)

    @cached_property
    def _checkpoint(self) -> dict[str, Tensor]:
        """The parameters of the checkpoint, for those that are not sent."""
        return loading.load(self.spec).parameters()

    def model_of(self, round: int) -> dict[str, Tensor]:
        """Returns the parameters that a round started from."""
        return self._model_in(self._sent[round])

    def _model_in(self, message: TappedMessage) -> dict[str, Tensor]:
        sent = self._read(self._places(message))
        if self.model.trained().keys() <= sent.keys():
            return sent
        return {**self._checkpoint, **sent}

    def held_out(self) -> list[tuple[int, ...]]:
        """Returns the texts that no client has."""
        if (file := self.about.truth.held_out) is None:
            return []
        if data.files.TableFile(path=Path(file)).known:
            named = "truth.held_out"
            corpus = data.read_own(Path(file), text="text", label=None, classes=None, what=named)
            return self.tokenised(corpus.texts)
        try:
            with naming(Path(file), "read"):
                text = content(Path(file), linked=True).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"truth.held_out = {file!r} is not UTF-8: save it as UTF-8"
            ) from error
        return self.tokenised([line for line in text.splitlines() if line.strip()])

    def tokenised(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns texts as clients feed them."""
        limit, most = self.model.max_length, self.about.truth.max_length
        return data.tokenise(texts, self.model.encode, limit=limit, max_length=most)

    def _classes(self) -> int | None:
        """Returns how many classes the model that was sent has; None if that cannot be told."""
        if not self._sent:
            raise ConfigError(f"{str(self.tapped.path)!r}: no model was sent to train")
        places = self._places(next(iter(self._sent.values())))  # refuses other models
        place = places.get(self.model.family.classifier[0])
        if self.about.model.task != CLASSIFICATION or place is None:
            return None
        with self.tapped.opened(place.kept) as file:
            return len(file.get_tensor(place.names[0]))

    # --- replies ----------------------------------------------------------------------------

    def updates(self, left_out: list[str]) -> Iterator[Update]:
        """Yields the updates of clients, and notes what is left out."""
        waiting = {(m.round, m.node) for m in self.messages if m.way == "sent"}
        waiting -= {(p.round, p.node) for p in self.tapped.problems()}
        had = set()
        for message in self.messages:
            if message.way != "received":
                continue
            waiting.discard((message.round, message.node))
            try:
                update = self._update(message)
                if (message.round, message.node) in had:
                    raise RefusedError("it is a second one of its round")
            except FedleakError as error:
                left_out.append(about_message(message.round, message.node, str(error)))
                continue
            had.add((message.round, message.node))
            yield update
        for round, node in sorted(waiting):
            left_out.append(about_message(round, node, "no answer came"))

    def sums(self, left_out: list[str]) -> Iterator[Update]:
        """Yields how each round changed the model, and notes what is left out."""
        for round, sent in self._sent.items():
            received = [m for m in self.messages if (m.way, m.round) == ("received", round)]
            # A client answers each stage of SecAgg+, and reports its number of examples only once.
            telling = [m for m in received if number(m, self.about.reply.examples_key) is not None]
            try:
                yield self._sum(round, sent, {m.node: m for m in telling or received})
            except FedleakError as error:
                left_out.append(about_message(round, None, str(error)))

    def _update(self, message: TappedMessage) -> Update:
        """Checks a reply.

        Raises:
            RefusedError: It is not an update of the model.
        """
        trained = self.model.trained()  # walks through all modules
        places = {name: place for name, place in self._places(message).items() if name in trained}
        if not places and _SECURE_AGGREGATION in message.numbers:
            raise RefusedError(
                "it is masked by secure aggregation and cannot be read: set reply.payload = 'sum'"
            )
        if not places:
            raise RefusedError("it holds no parameter of the model")
        sent, examples = self._sent_to(message), self._examples(message)
        known = self._known_of(message, examples)

        def tensors() -> dict[str, Tensor]:
            return self._change(self._read(places), self._model_in(sent), known)

        names = frozenset(tensors())  # all of it is checked now
        return Update(message, (message.node,), examples, names, known, tensors)

    def _sum(self, round: int, sent: TappedMessage, replies: Mapping[int, TappedMessage]) -> Update:
        """Returns the change of the model as the weighted mean of the updates of a round.

        Raises:
            RefusedError: The model after the round was sent to nobody, or no answer came.
        """
        place = next(i for i, message in enumerate(self.messages) if message is sent)
        shown = (m for m in self.messages[place:] if m.arrays and m.way != "received")
        later = (m for m in shown if m.way == "evaluated" or m.round > round)
        following = next(later, None)
        if following is None:
            raise RefusedError("its model was sent to nobody, so what changed it is not here")
        if not replies:
            raise RefusedError("no answer came")
        examples = sum(map(self._examples, replies.values()))
        # The client with most examples makes most steps.
        most = max(replies.values(), key=self._examples)
        known = self._known_of(most, self._examples(most))

        def tensors() -> dict[str, Tensor]:
            return self._change(self._model_in(following), self._model_in(sent), known)

        nodes, names = tuple(sorted(replies)), frozenset(tensors())
        return Update(most, nodes, examples, names, known, tensors, summed=True)

    def _sent_to(self, message: TappedMessage) -> TappedMessage:
        """Returns what a node was sent before its reply."""
        first = self._sent.get(message.round)
        own = self._sent_to_node.get((message.round, message.node))
        if first is None or own is None:
            raise RefusedError("nothing was sent to it in this round")
        if {kept.file for kept in own.arrays} != {kept.file for kept in first.arrays}:
            raise RefusedError("it was sent another model than the first node of its round")
        return own

    def _change(
        self, tensors: dict[str, Tensor], before: Mapping[str, Tensor], sent: SentUpdate
    ) -> dict[str, Tensor]:
        """Returns the gradient or the delta in what was sent, without weight decay.

        A parameter that did not change was not trained, so it is absent.
        """
        if sent.payload == "gradient":
            return tensors
        changes, trained = {}, self.model.trained()
        for name in list(tensors):
            value = tensors.pop(name)  # so one parameter at a time is in memory twice
            if name not in trained:
                continue
            if sent.payload == "weights":
                value = value - before[name]
            value = sent.without_decay(value, before[name])
            if value.any():
                changes[name] = value
        return changes

    def _known_of(self, message: TappedMessage, examples: int) -> SentUpdate:
        """Returns what the server knows of an update of so many examples."""
        table, payload = self.about.training, self.about.reply.payload
        steps, rate = table.steps_said, self._rate(message)
        if table.schedule_rounds is not None:  # one rate in each round
            rate, _ = table.schedule_of_rate.in_round(rate, 1, message.round, table.recipe)
            steps |= {"schedule": "constant", "schedule_rounds": None, "final_learning_rate": 0.0}
        return SentUpdate(
            num_examples=examples,
            payload="weights" if payload == "sum" else payload,
            learning_rate=rate,
            local_steps=1 if payload == "gradient" else table.steps(examples),
            local_epochs=table.local_epochs,
            dropout=table.dropout,
            own_head=self.about.reply.own_head,
            **({} if payload == "gradient" else steps),
        )

    def _rate(self, message: TappedMessage) -> float:
        table = self.about.training
        if table.learning_rate_key is None:
            assert table.learning_rate is not None
            return table.learning_rate
        value = number(self._sent_to(message), table.learning_rate_key)
        if value is None:
            value = number(message, table.learning_rate_key)
        if value is None or not 0 < value < math.inf:
            raise RefusedError(
                f"training.learning_rate_key = {table.learning_rate_key!r} is no number above 0 in "
                "what was sent or received"
            )
        return float(value)

    def _examples(self, message: TappedMessage) -> int:
        """Returns how many examples a client reports, checked against its steps.

        Raises:
            RefusedError: It reports no number, or more than its steps have room for.
        """
        reply, training = self.about.reply, self.about.training
        value = number(message, reply.examples_key) if reply.examples is None else reply.examples
        if value is None or not 1 <= value <= MOST_EXAMPLES or int(value) != value:
            keys = sorted({key for record in message.numbers.values() for key in record})
            raise RefusedError(
                f"reply.examples_key = {reply.examples_key!r} is no number of examples in it, "
                f"which has {printable(', '.join(keys))[:_LONGEST] or 'no metric'}: name another "
                "key, or set reply.examples"
            )
        steps = 1 if self.kind == UpdateKind.GRADIENT else training.local_steps
        step = training.examples_in_step
        if steps is not None and value > steps * step:
            raise RefusedError(
                f"its number of examples is {value:,.0f}, but {steps:,} steps of {step:,} have "
                f"{steps * step:,} at most: set reply.examples to what a client trains on in a "
                "round, or mend the steps in [training]"
            )
        return int(value)

    # --- arrays -----------------------------------------------------------------------------

    def _places(self, message: TappedMessage) -> dict[str, "_Place"]:
        """Returns where each parameter of the model is in a message.

        Raises:
            ConfigError: A name that the model does not have.
            RefusedError: A parameter is in two records.
        """
        wanted, places = self.about.reply.records, dict[str, _Place]()
        for kept in message.arrays:
            if wanted is not None and kept.record not in wanted:
                continue
            for sent, own in self._matched(tuple(sorted(self.tapped.names(kept)))).items():
                place = places.setdefault(own, _Place(kept, []))
                if place.kept != kept:
                    raise RefusedError(
                        f"{own} is in several of its array records: name those that count in "
                        "reply.records"
                    )
                place.names.append(sent)
        return places

    def _match(self, names: tuple[str, ...]) -> dict[str, str]:
        """Returns the model's name for each name that was sent."""
        own = list(self.model.module.state_dict())
        if set(names) == {str(i) for i in range(len(own))}:  # a list, as state_dict is ordered
            matches = matched(own, self.model.module)
            return {str(own.index(name)): parameter for name, parameter in matches.items()}
        reply = self.about.reply
        chosen = [name for name in names if name.startswith(reply.prefix)]
        return matched(chosen, self.model.module, reply.names, reply.own_head)

    def _read(self, places: Mapping[str, "_Place"]) -> dict[str, Tensor]:
        """Returns parameters in float32.

        Raises:
            RefusedError: Another shape than the model's, whole numbers, not finite numbers, or two
                values.
        """
        tensors = {}
        # A file is opened once for all that is in it: its beginning lists every array.
        for kept, of_file in groupby(places.items(), key=lambda item: item[1].kept):
            with self.tapped.opened(kept) as file:
                for name, place in of_file:
                    values = [file.get_tensor(spelling) for spelling in place.names]
                    tensors[name] = self._checked(name, values, place.names)
        return tensors

    def _checked(self, name: str, values: Sequence[Tensor], spellings: Sequence[str]) -> Tensor:
        """Returns a parameter in float32, of which there is a value for each spelling."""
        like = self.model.module.get_parameter(name)
        value, *others = values
        if value.shape != like.shape:
            shapes = f"{list(value.shape)}, but the model's {list(like.shape)}"
            raise RefusedError(f"{name} has the shape {shapes}")
        if not value.is_floating_point():
            raise RefusedError(
                f"{name} holds whole numbers: what is masked or quantised cannot be read; "
                "where clients use secure aggregation, set reply.payload = 'sum'"
            )
        if not all_finite(value):
            raise RefusedError(f"not every number of {name} is finite")
        if not all(torch.equal(value.float(), other.float()) for other in others):
            named = printable(" and ".join(map(repr, spellings)))[:_LONGEST]
            raise RefusedError(f"{named} both mean {name}, and differ")
        return value.float()


class _Place(NamedTuple):
    """Where a parameter is: an array record, and its names there; a tied parameter has several."""

    kept: KeptArrays
    names: list[str]


def number(message: TappedMessage, key: str) -> int | float | None:
    """Returns a number of a message by its key; None if there is none."""
    for record in message.numbers.values():
        value = record.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def about_message(round: int | None, node: int | None, reason: str) -> str:
    """Returns a reason with the message that it is about, safe to print."""
    details = [f"{kind} {n}" for kind, n in (("round", round), ("node", node)) if n is not None]
    return f"{', '.join(details)}: " * bool(details) + printable(reason)[:_LONGEST]
