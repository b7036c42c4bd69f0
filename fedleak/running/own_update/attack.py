"""Attacks an update of somebody's own training, as a worker attacks a capture."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import Field, InstanceOf, SkipValidation, ValidationError, validate_call
from torch import nn

from fedleak.attacks import Progress
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.config.components import NamedAttack, build_attack
from fedleak.config.experiment import LARGEST_SEED
from fedleak.config.sent_update import SentUpdate, plain_number, whole_numbers, wrong_argument
from fedleak.models import LanguageModel, loading
from fedleak.models.adoption import adopt, inner
from fedleak.running.own_update.observing import Tensors, observe
from fedleak.running.workers import attempt
from fedleak.running.workers.model_state import changed, state
from fedleak.running.workers.process import Task, answer_of, device_name, failure
from fedleak.store.records import Answer
from fedleak.store.run import Key
from fedleak.training.observation import Observation, ThreatModel
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream
from fedleak.util.sanitise import printable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttackResult:
    """What an attack answered to an update.

    Attributes:
        answer: The answer, as a run keeps it: token ids, evidence, diagnostics.
        model: The model that was attacked, without its weights: scores need its tokenizer.
        sent: What the attack knew about the update.
    """

    answer: Answer
    model: LanguageModel = field(repr=False)
    sent: SentUpdate = field(repr=False)

    @property
    def status(self) -> Status:
        """Recovered, abstained, inadmissible or failed; `reason` says why it is not recovered."""
        return self.answer.status

    @property
    def reason(self) -> str:
        """Why there is no answer, or why it is not proved; may be empty."""
        return self.answer.reason

    @property
    def verified(self) -> bool:
        """Whether the whole answer is proved: its gradient, recomputed, equals the update."""
        return self.answer.verified

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that were read, best evidence first, without special tokens."""
        return tuple(self.model.decode(ids) for ids in self.answer.sequences or ())

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens that the attack says were in the batch, without an order."""
        special = self.model.special_ids()
        return tuple(self.model.decode([t]) for t in self.answer.tokens or () if t not in special)

    def __str__(self) -> str:
        """Returns what was read, in lines that no terminal interprets."""
        answer = self.answer
        took = "" if answer.seconds is None else f" in {answer.seconds:.1f} s"
        proof = "proved" if answer.verified else "not proved"
        lines = [f"{answer.attack}: {answer.status}{took}, {proof}"]
        if answer.reason:
            lines.append(f"  {answer.reason}")
        for text, evidence in zip(self.texts, answer.evidence, strict=True):
            shown_evidence = "" if evidence is None else f"  (evidence {evidence:.2g})"
            lines.append(f"  {printable(text)}{shown_evidence}")
        if answer.sequences is None and self.words:
            lines.append(f"  words: {printable(' '.join(self.words))}")
        return "\n".join(lines)


Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def checked(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Checks the types of a call's arguments, and says in one line what is not right."""
    strict = {"strict": True, "arbitrary_types_allowed": True}
    validated = validate_call(config=strict)(function)  # type: ignore[call-overload]

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        arguments = signature(function).bind(*args, **kwargs).arguments
        try:
            returned: _Returned = validated(**{n: plain_number(v) for n, v in arguments.items()})
        except ValidationError as error:
            raise wrong_argument(error) from error
        return returned

    return call


@checked
def attack(
    update: Annotated[Tensors, SkipValidation],
    model: Annotated[nn.Module | str | os.PathLike[str], SkipValidation],
    tokenizer: Any = None,
    *,
    sent: InstanceOf[SentUpdate],
    kind: str = "auto",
    settings: Mapping[str, Any] | None = None,
    task: str | None = None,
    seed: Seed = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> AttackResult:
    """Attacks an update of your own training.

    The model, its gradients and the tokenizer stay as they are: a copy is attacked, in float32, in
    this process, on the model's device.

    Args:
        update: Tensors by parameter name; or in the order of `model.parameters()`, as
            `torch.autograd.grad` returns them; or the module that holds them, after
            `loss.backward()`. Parameters that were not sent are absent, or None. Parts of names
            that wrappers add (`module.`, `base_model.model.`, `_orig_mod.`) do not matter. The
            type of a tensor says how exact it is: give half precision as it is.
        model: The transformers model at the weights that training started from: a BERT, GPT-2 or
            LLaMA for sequence classification or next-token prediction, in any wrapper. Or the
            name of a folder or hub id with all of its weights. A model with a head of your own
            needs `names` or `own_head` in `sent`.
        tokenizer: The model's tokenizer; only if the model is a module.
        sent: What the server knows of the update: at least how many texts it was computed on.
        kind: The attack; `fedleak list` names them.
        settings: Settings of the attack, by name, as in `[[attack]]` of an experiment file.
        task: "sequence-classification" or "causal-lm", for a model that is given by its name; left
            out: the task that the model was saved for.
        seed: Decides what the attack draws.
        on_progress: Called with the progress of a long attack.

    Returns:
        The answer. If the attack crashes, the status of the answer is "failed".

    Raises:
        ConfigError: The update does not fit the model, or something else that you can mend.
    """
    victim = _victim(model, tokenizer, task, sent)
    settings = {} if settings is None else settings
    if "kind" in settings:
        raise ConfigError(
            f"settings: kind = {settings['kind']!r} is the attack itself, and that is {kind!r}: "
            "leave it out"
        )
    named = build_attack(0, {"kind": kind, **settings})
    named.check_equipment()
    named = replace(named, threat=ThreatModel(sent.granted))
    numbers_between("labels", sent.labels or (), 0, victim.num_labels - 1)
    numbers_between("lengths", sent.lengths or (), 1, victim.max_length)
    if sent.dropout is None:
        sent = sent.model_copy(update={"dropout": _dropout(model)})
    order = model if isinstance(model, nn.Module) else None
    if order is not None and not sent.own_head and not sent.names:
        order = inner(order)
    seen = observe(update, victim, sent, order)
    for name in seen.update.tensors:  # certificates recompute these, even if frozen since
        victim.module.get_parameter(name).requires_grad_(True)
    start = time.perf_counter()
    reconstruction = _attempt(named, seen, victim, seed, on_progress)
    answer = answer_of(
        Task(key=Key(seen.round, seen.client), attack=named, knowledge=seen.knowledge),
        reconstruction,
        seconds=round(time.perf_counter() - start, 4),
        device=device_name(str(victim.device)),
        together=1,
    )
    victim.module.to("meta")  # its weights take memory, and nothing needs them any more
    return AttackResult(answer, victim, sent)


def _victim(
    model: nn.Module | str | os.PathLike[str], tokenizer: Any, task: str | None, sent: SentUpdate
) -> LanguageModel:
    """Returns a copy of the model, or the model of that name."""
    learned: dict[str, Any] = {"loss": sent.loss, "response_template": sent.response_template}
    learned["own_head"] = sent.own_head
    if not isinstance(model, str | os.PathLike):
        if tokenizer is None:
            raise ConfigError("tokenizer is missing: give the one that the model is trained with")
        if task is not None:
            raise ConfigError("task is what the model's class says: leave it out")
        return adopt(model, tokenizer, names=sent.names, **learned)
    if tokenizer is not None:
        raise ConfigError("tokenizer: a model that is given by its name has its own: leave it out")
    return loading.load_checkpoint(os.fspath(model), task=task, **learned)


def _dropout(model: object) -> bool | None:
    """Whether a module trains with dropout as it is now; None: a model's name does not show it."""
    if not isinstance(model, nn.Module):
        return None
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Dropout))
    return any(layer.training and layer.p > 0 for layer in layers)


def numbers_between(name: str, values: Any, lowest: int, highest: int) -> tuple[int, ...]:
    """Returns numbers of any library as plain ones.

    Raises:
        ConfigError: They are something else than whole numbers from `lowest` to `highest`.
    """
    try:
        numbers = whole_numbers(values)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if wrong := [number for number in numbers if not lowest <= number <= highest]:
        raise ConfigError(f"{name} has {wrong[0]}, a number that is not from {lowest} to {highest}")
    return numbers


def _attempt(
    named: NamedAttack,
    seen: Observation,
    model: LanguageModel,
    seed: int,
    on_progress: Callable[[Progress], None],
) -> Reconstruction:
    """Calls an attack as a worker does, and returns its checked answer."""
    if (refused := attempt.unfit(named.attack, seen, model)) is not None:
        return refused
    before, rng = state(model), stream(seed, "attack", named.name, seen.round, seen.client)
    try:
        returned = attempt.call(
            named.attack, [seen], model, rngs=[rng], report=lambda _, at: on_progress(at)
        )
    except Exception as error:  # noqa: BLE001 - it may be anybody's attack
        _log.info("the attack %s crashed", named.name, exc_info=error)
        return Reconstruction.none(Status.FAILED, failure(error))
    return attempt.answers(named.attack, returned, [seen], model, changed(model, before))[0]
