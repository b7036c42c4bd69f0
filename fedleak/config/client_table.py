"""How a client steps, in the words of a user: of `[client]`, of a tap, and of an update."""

from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, JsonValue

from fedleak.config.tables import Positive, Table
from fedleak.training.recipe import Optimiser, Precision, Recipe, Schedule, Shape
from fedleak.util.errors import unknown


def one_of(what: str, choices: Collection[str]) -> BeforeValidator:
    """Returns a check that names what was meant."""

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(unknown(what, str(value), choices))
        return value

    return BeforeValidator(check)


def _simulated(precision: Any) -> Any:
    """Refuses half precision of another kind, which is no spelling of a known one."""
    if precision in ("float16", "float16-mixed", "fp16"):
        raise ValueError(
            f"{precision!r} needs its loss scaled, which is not simulated: use 'bfloat16-mixed' or "
            "'bfloat16'"
        )
    return precision


class StepTable(Table):
    """How a client steps; left out: by plain SGD in float32."""

    optimiser: Annotated[Optimiser, one_of("optimiser", get_args(Optimiser))] = "sgd"
    """What a client steps with: one of `torch.optim`, new in each round, with torch's defaults for
    what is not here, or any `other` one.

    After any but plain SGD an update is no sum of gradients: most attacks read less of it, or
    nothing, and an answer is proved by replay alone. One step of Adam still shows small gradients.
    """
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of `sgd`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay, which `adamw` takes from the weights, and the others add to the gradient; by
    default PyTorch's AdamW has 0.01, and the Trainer of transformers 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm that the gradient of each step is clipped to, as trainers do; left out: not clipped.

    It is no defense: it does not bound what an example contributes.
    """
    accumulate: Positive = 1
    """Batches whose examples make one step."""
    precision: Annotated[
        Precision, one_of("precision", get_args(Precision)), BeforeValidator(_simulated)
    ] = "float32"
    """What clients compute in: `bfloat16-mixed` is autocast; under `bfloat16` weights have it,
    too."""
    schedule: Shape = "constant"
    """How the learning rate falls from its first value: not, or along a line or half a cosine."""
    schedule_rounds: Positive | None = None
    """Rounds that it takes to fall, with one rate in each round. Left out: it falls over the steps
    of every round."""
    final_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Where the schedule ends: not above the learning rate, from which it falls."""

    def _problems(self) -> Iterator[str]:
        """Yields keys that are of another optimiser, or of a schedule that is not there."""
        if self.momentum and self.optimiser != "sgd":
            yield f"momentum is for 'sgd', and optimiser = {self.optimiser!r}: leave it out"
        for key in ("schedule_rounds", "final_learning_rate"):
            if self.schedule == "constant" and (value := getattr(self, key)):
                yield f"{key} = {value:g} is for a schedule, and there is none: set schedule"

    @property
    def steps_said(self) -> dict[str, Any]:
        """How a client steps, as any of the tables says it."""
        return self.model_dump(mode="json", include=set(StepTable.model_fields))

    @property
    def recipe(self) -> Recipe:
        """How a client steps, with one learning rate."""
        return Recipe(**self.model_dump(include={field.name for field in fields(Recipe)}))

    @property
    def schedule_of_rate(self) -> Schedule:
        """How the learning rate falls."""
        return Schedule(
            shape=self.schedule, final=self.final_learning_rate, rounds=self.schedule_rounds
        )


class ClientTable(StepTable):
    """`[client]`: how a client steps under `fedavg`; left out: by plain SGD in float32."""

    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """An optimiser of `torch.optim`, new in each round, with torch's defaults for what is not here.

    After any but plain SGD an update is no sum of gradients: most attacks read less of it, or
    nothing. One step of Adam still shows small gradients.
    """
    max_steps: Positive | None = None
    """Steps of a round at most; a client then trains on as many random examples as these take.

    It reports their number. Left out: all steps of `federation.local_epochs`.
    """

    @property
    def changed(self) -> dict[str, JsonValue]:
        """What is not at its default."""
        return self.model_dump(mode="json", exclude_defaults=True)
