"""Attacks by somebody else, which do what they must not, in a module that a worker can import."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.attacks.reconstruction import Reconstruction, Status

RECOVERED = Status.RECOVERED


def _circle():
    value = []
    value.append(value)
    return value


ANSWERS = {
    "nothing": lambda: None,
    "a dict": lambda: {"status": "recovered"},
    "a status that is none": lambda: Reconstruction(status="proved", tokens=(1,)),
    "an id that is no token": lambda: Reconstruction(
        status=RECOVERED, sequences=((2000,),), evidence=(0.0,)
    ),
    "a negative id": lambda: Reconstruction(status=RECOVERED, sequences=((-1,),), evidence=(0.0,)),
    "a huge id": lambda: Reconstruction(status=RECOVERED, tokens=(10**5000,)),
    "words": lambda: Reconstruction(
        status=RECOVERED, sequences=(("the", "patient"),), evidence=(0.0,)
    ),
    "a text": lambda: Reconstruction(status=RECOVERED, sequences="the patient"),
    "a tensor": lambda: Reconstruction(
        status=RECOVERED, sequences=(torch.tensor([1, 2]),), evidence=(0.0,)
    ),
    "ids of floats": lambda: Reconstruction(status=RECOVERED, sequences=((1.0,),), evidence=(0.0,)),
    "a bool for an id": lambda: Reconstruction(
        status=RECOVERED, sequences=((True,),), evidence=(0.0,)
    ),
    "a generator": lambda: Reconstruction(status=RECOVERED, tokens=(i for i in range(3))),
    "an empty sequence": lambda: Reconstruction(status=RECOVERED, sequences=((),), evidence=(0.0,)),
    "too long a sequence": lambda: Reconstruction(
        status=RECOVERED, sequences=((5,) * 129,), evidence=(0.0,)
    ),
    "too many sequences": lambda: Reconstruction(
        status=RECOVERED, sequences=((5,),) * 101, evidence=(0.0,) * 101
    ),
    "evidence of another length": lambda: Reconstruction(
        status=RECOVERED, sequences=((5,),), evidence=()
    ),
    "evidence without sequences": lambda: Reconstruction(
        status=RECOVERED, sequences=None, evidence=(1.0,), tokens=(5,)
    ),
    "margins of another length": lambda: Reconstruction(
        status=RECOVERED, sequences=((5,),), evidence=(0.0,), margins=(1.0, 2.0)
    ),
    "evidence of text": lambda: Reconstruction(
        status=RECOVERED, sequences=((5,),), evidence=("good",)
    ),
    "a fact of a long name": lambda: Reconstruction(status=RECOVERED, facts={"x" * 101: 1}),
    "endless facts": lambda: Reconstruction(
        status=RECOVERED, facts=dict.fromkeys(map(str, range(101)))
    ),
    "facts of tensors": lambda: Reconstruction(
        status=RECOVERED, facts={"label_counts": torch.ones(2)}
    ),
    "facts in a list": lambda: Reconstruction(status=RECOVERED, facts=[1]),
    "a key of tokens": lambda: Reconstruction(status=RECOVERED, diagnostics={(1, 2): 2}),
    "a circle": lambda: Reconstruction(status=RECOVERED, diagnostics={"circle": _circle()}),
    "half a character": lambda: Reconstruction(status=RECOVERED, diagnostics={"a": ["\ud800"]}),
    "a fact of half a character": lambda: Reconstruction(status=RECOVERED, facts={"\udfff": 1}),
    "a function": lambda: Reconstruction(status=RECOVERED, diagnostics={"f": print}),
    "a budget of text": lambda: Reconstruction(status=RECOVERED, diagnostics={"budget": "all"}),
    "a budget of zero": lambda: Reconstruction(status=RECOVERED, diagnostics={"budget": [1, 0]}),
    "endless candidates": lambda: Reconstruction(
        status=RECOVERED, diagnostics={"candidates": {"all": math.inf}}
    ),
    "candidates of text": lambda: Reconstruction(
        status=RECOVERED, diagnostics={"candidates": {"a": "b"}}
    ),
    "a library": lambda: Reconstruction(status=RECOVERED, diagnostics={"text": "x" * 10_000_001}),
    "a reason of bytes": lambda: Reconstruction(status=Status.ABSTAINED, reason=b"why"),
    "a proof of made-up tokens": lambda: Reconstruction(
        status=RECOVERED, sequences=((2, 40, 41, 3),) * 2, evidence=(0.0,) * 2, verified=True
    ),
    "a proof of no sequence": lambda: Reconstruction(status=RECOVERED, tokens=(5,), verified=True),
    "a proof of text": lambda: Reconstruction(status=RECOVERED, tokens=(5,), verified="yes"),
}


@torch.no_grad()
def _zero(model):
    for value in model.module.parameters():
        value.zero_()


@torch.no_grad()
def _one_number(model):
    model.module.get_parameter("classifier.weight").data[1, 3] += 1e-3


@torch.no_grad()
def _swap_rows(model):
    weight = next(model.module.parameters()).data
    weight[[5, 6]] = weight[[6, 5]]


@torch.no_grad()
def _swap_columns(model):
    weight = next(model.module.parameters()).data
    weight[:, [5, 6]] = weight[:, [6, 5]]


def _buffers(model):
    next(model.module.buffers()).data[0, 0] += 1


def _delete(model):
    del model.module.classifier


CHANGES = {
    "weights": _zero,
    "weights: one number": _one_number,
    "weights: rows": _swap_rows,
    "weights: columns": _swap_columns,
    "buffers": _buffers,
    "train mode": lambda model: model.module.train(),
    "requires_grad": lambda model: model.module.requires_grad_(False),
    "gradients": lambda model: model.module.get_parameter("classifier.bias").sum().backward(),
    "hooks": lambda model: model.module.register_forward_hook(lambda *_: None),
    "layers": _delete,
}


@dataclass(frozen=True)
class Hostile:
    """Answers or changes what it says.

    Attributes:
        answers: What, of `ANSWERS`.
        changes: What of the model, of `CHANGES`.
        update: What it does to the update: "write" into its tensors, "replace" or "clear" them.
        crash: Whether it ends in an error.
    """

    kind: ClassVar[str] = "hostile"
    uses: ClassVar[frozenset[str]] = frozenset()
    answers: str | None = None
    changes: str | None = None
    update: str | None = None
    crash: bool = False

    def obstacle(self, setting):
        return None

    def __call__(self, seen, model, *, rng):
        if self.changes is not None:
            CHANGES[self.changes](model)
        for name, tensor in list(seen.update.tensors.items()) if self.update else ():
            if self.update == "write":
                tensor.zero_()
            elif self.update == "replace":
                seen.update.tensors[name] = torch.zeros_like(tensor)
            else:
                del seen.update.tensors[name]
        if self.crash:
            raise RuntimeError("crashed")
        if self.answers is not None:
            return ANSWERS[self.answers]()
        return Reconstruction(
            status=RECOVERED,
            sequences=((5, 6),),
            evidence=(math.nan,),
            margins=(math.inf,),
            tokens=(5, 6),
        )


@dataclass(frozen=True)
class Forecaster(Hostile):
    """Reads a fact that nobody else knows, and one wrongly."""

    kind: ClassVar[str] = "forecaster"

    def __call__(self, seen, model, *, rng):
        return Reconstruction(
            status=RECOVERED, facts={"weather": ["rain", 1], "longest_sequence": 1}
        )


@dataclass(frozen=True)
class Few(Hostile):
    """Forgets one of several observations."""

    kind: ClassVar[str] = "few"
    at_once: int = 2

    def many(self, seen, model, *, rngs, report):
        return [
            self(observation, model, rng=rng)
            for observation, rng in zip(seen[1:], rngs, strict=False)
        ]
