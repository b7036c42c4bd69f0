"""What the server knows of an update, whoever trained: a user's own loop, or another Flower app."""

from collections.abc import Iterator, Sequence
from operator import index
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError
from torch import Tensor

from fedleak.config.client_table import StepTable, one_of
from fedleak.config.tables import Positive
from fedleak.config.wording import one_line
from fedleak.training.observation import GRANTABLE, Knowledge
from fedleak.training.recipe import Recipe
from fedleak.util.errors import ConfigError
from fedleak.util.sanitise import printable

_LONGEST = 400
"""Characters of an error about an argument, which may be anything."""


def whole_numbers(values: Any) -> tuple[int, ...]:
    """Returns whole numbers of any library as plain ones.

    Raises:
        ValueError: They are something else.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise ValueError("give a list of whole numbers") from None


WholeNumbers = Annotated[Sequence[int], BeforeValidator(whole_numbers)]

Payload = Literal["gradient", "delta", "weights"]
"""What the tensors of an update are."""


def plain_number(value: Any) -> Any:
    """Returns a number of NumPy or torch as a plain one, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def wrong_argument(error: ValidationError) -> ConfigError:
    """Returns what is wrong with the arguments of a call, in one line."""
    return ConfigError(printable(one_line(error, SentUpdate))[:_LONGEST])


class SentUpdate(StepTable):
    """What the server knows of an update that a client sent.

    Raises:
        ConfigError: A value is not right.
    """

    num_examples: Positive
    """Texts that the update was computed on. A federated client reports the number."""
    payload: Annotated[Payload, one_of("kind of update", get_args(Payload))] = "gradient"
    """`gradient`, of the mean loss of the batch; `delta`, weights after training minus the weights
    before; `weights`, those after training."""
    loss: str = "cross-entropy"
    """What a classifier is trained on: `cross-entropy`, or `squared` of logits and one-hot classes.
    Next-token prediction has cross-entropy, a mean over all tokens, and an end token behind each
    text."""
    response_template: str = ""
    """The words before each response, as in `[model]`: the loss counts what stands behind them.
    Left out: all tokens."""
    own_head: bool = False
    """Whether the client puts a head of its own on the model, which is not known: the model is then
    what `AutoModel` makes. Attacks that need no head read the update; nothing else is tried."""
    names: dict[str, str] = {}
    """Names of parameters in the update that are not those of the model, and the model's for them,
    such as {"head.weight": "classifier.weight"} for a head that is the same as the model's."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of the client's steps, the first where there is a `schedule`; needed for `delta` and
    `weights`."""
    local_steps: Positive = 1
    """How many there were."""
    local_epochs: Positive = 1
    """Passes over the texts that these steps made."""
    dropout: bool | None = None
    """Whether it was on, or that of adapters. Left out: whether the module is in training mode when
    it is attacked."""
    batch_size: Positive | None = None
    """Granted to the attacker: texts in one local step, with those that are accumulated."""
    labels: WholeNumbers | None = None
    """Granted to the attacker: the class of each text."""
    lengths: WholeNumbers | None = None
    """Granted to the attacker: the number of tokens of each text, special tokens included."""
    noise_scale: Annotated[float, Field(ge=0)] | None = None
    """Granted to the attacker: standard deviation of noise that the client added to each number."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{name: plain_number(value) for name, value in values.items()})
        except ValidationError as error:
            raise wrong_argument(error) from error

    def _problems(self) -> Iterator[str]:
        """Yields what cannot be of one update."""
        yield from super()._problems()
        for name in ("labels", "lengths"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != self.num_examples:
                yield f"{name} has {len(numbers)} numbers for num_examples = {self.num_examples}"
        if self.own_head and (self.names or self.labels):
            yield "own_head says that the head is not known: leave it out, or names and labels"
        room = self.local_steps * (self.batch_size or self.num_examples)
        if self.num_examples > room:
            yield (
                f"num_examples = {self.num_examples}, and the local_steps = {self.local_steps} of "
                f"batch_size = {self.batch_size} see {room} at most: give the texts that the steps "
                "saw, not those that the client has"
            )
        if self.schedule_rounds is not None:
            yield (
                "schedule_rounds is of a federation's rounds: give the learning_rate of this one"
            )
        if self.payload == "gradient" and self.steps_said != StepTable().steps_said:
            yield (
                "a gradient is what the optimiser gets: leave out how the client stepped, or give "
                "what it made of the weights (payload='delta' or 'weights')"
            )
        if self.payload != "gradient" and self.learning_rate is None:
            yield (
                f"learning_rate is missing: {self.payload} tells a gradient only with the rate of "
                "the steps"
            )

    @property
    def granted(self) -> frozenset[str]:
        """The facts that the attacker has beyond the protocol."""
        return frozenset(name for name in GRANTABLE if getattr(self, name) is not None)

    def knowledge(self) -> Knowledge:
        """Returns what the attacker knows; facts about texts are in the order of an observation."""
        facts = {name: getattr(self, name) for name in self.granted}
        if self.lengths:
            order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
            for name in facts.keys() & {"labels", "lengths"}:
                facts[name] = tuple(facts[name][i] for i in order)
        rate, recipe = self._stepped
        return Knowledge(
            learning_rate=rate,
            local_steps=self.local_steps,
            dropout=self.dropout,
            local_epochs=None if self.payload == "gradient" else self.local_epochs,
            recipe=None if self.payload == "gradient" else recipe,
            own_head=self.own_head or None,
            **facts,
        )

    @property
    def _stepped(self) -> tuple[float | None, Recipe]:
        """The mean learning rate, and how the client stepped."""
        if self.learning_rate is None:
            return None, self.recipe
        return self.schedule_of_rate.in_round(self.learning_rate, self.local_steps, 1, self.recipe)

    def without_decay(self, delta: Tensor, before: Tensor) -> Tensor:
        """Returns a delta of a parameter minus the effect of weight decay alone."""
        rate, recipe = self._stepped
        if rate is None:
            return delta
        return recipe.without_decay(delta, before, rate, self.local_steps)
