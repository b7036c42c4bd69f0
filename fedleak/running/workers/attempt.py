"""One call of an attack, wherever the observations come from: what goes in, and what comes out.

An attack may be anybody's, so its answer is checked before it is trusted: a claimed proof is
recomputed here. If a client's steps can be made again, a right answer is proved here, whichever
attack gave it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedleak.attacks import Attack, AttackSetting, Batched, OnProgress, certificate, replay
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel
from fedleak.running.workers.answers import InvalidAnswerError, checked, one_line
from fedleak.training.observation import Observation, UpdateKind
from fedleak.util.finite import all_finite


def unfit(attack: Attack, seen: Observation, model: LanguageModel) -> Reconstruction | None:
    """Returns the answer, without a call, if an observation cannot be attacked; None if it can."""
    obstacle = attack.obstacle(AttackSetting.of(seen, model))
    if obstacle is not None:
        return Reconstruction.none(Status.INADMISSIBLE, one_line(str(obstacle)))
    if not all(map(all_finite, seen.update.tensors.values())):
        reason = "not every number of the update is finite: training diverged, or a cast overflowed"
        return Reconstruction.none(Status.ABSTAINED, reason)
    return None


def call(
    attack: Attack,
    seen: Sequence[Observation],
    model: LanguageModel,
    *,
    rngs: Sequence[torch.Generator],
    report: OnProgress,
) -> object:
    """Calls an attack; what it returns may be anything.

    An attack that wrote into an update has failed: its claims are compared with the update.

    Args:
        attack: What is called.
        seen: Several only for an attack that takes them at once.
        model: At the weights of that round.
        rngs: The random stream of each observation.
        report: Called with the progress.
    """
    given = _tensors(seen)
    before = certificate.written(given)
    if isinstance(attack, Batched):
        returned: object = attack.many(seen, model, rngs=rngs, report=report)
    else:
        pairs = zip(seen, rngs, strict=True)
        returned = [attack(observation, model, rng=rng) for observation, rng in pairs]
    # `given` is held until here, so that no other tensor can be at its place in memory.
    if certificate.written(_tensors(seen)) != before or certificate.written(given) != before:
        reason = (
            "the attack changed the update, so its answer does not count: it has to work on a copy"
        )
        return [Reconstruction.none(Status.FAILED, reason)] * len(seen)
    return returned


def _tensors(seen: Sequence[Observation]) -> list[Tensor]:
    return [t for observation in seen for t in observation.update.tensors.values()]


def answers(
    attack: Attack,
    returned: object,
    seen: Sequence[Observation],
    model: LanguageModel,
    spoiled: Sequence[str],
) -> list[Reconstruction]:
    """Returns an answer for each observation: the attack's, if that is one, else a failure.

    Args:
        attack: What was called. A replay gets no more time than the attack.
        returned: What it returned.
        seen: What it was called with.
        model: What it was called with.
        spoiled: Parts of the model that the attack changed, by name.
    """
    if spoiled:
        reason = (
            f"the attack changed the model ({', '.join(spoiled)}), so its answer does not count: "
            "it has to work on a copy"
        )
        return [Reconstruction.none(Status.FAILED, reason)] * len(seen)
    given = returned if isinstance(returned, list | tuple) else None
    if given is None or len(given) != len(seen):
        description = "no list of answers" if given is None else f"{len(given)} answers"
        reason = f"the attack returned {description} for {len(seen)} observations"
        return [Reconstruction.none(Status.FAILED, reason)] * len(seen)
    seconds = getattr(attack, "seconds", None) or replay.SECONDS
    answered = zip(given, seen, strict=True)
    return [_answer(answer, observation, model, seconds) for answer, observation in answered]


def _answer(
    answer: object, seen: Observation, model: LanguageModel, seconds: float
) -> Reconstruction:
    """Returns an attack's answer, or a failure if it is not valid."""
    candidates = seen.knowledge.candidates
    try:
        plain = checked(
            answer,
            vocabulary=int(model.module.config.vocab_size),  # type: ignore[union-attr,arg-type]
            longest=model.max_length,
            examples=seen.update.num_examples,
            listed=len(candidates.listed) if candidates else 0,
        )
        linear = certificate.is_linear(seen)
        if linear and plain.verified and certificate.proves(model, plain.sequences or (), seen):
            return plain
        if not linear or seen.update.kind != UpdateKind.GRADIENT:
            # Weights round, and so does a step that is made again; a gradient by itself does not.
            return _replayed(plain, seen, model, seconds)
        if plain.verified:
            raise InvalidAnswerError(
                "it claims a proof, and the gradient of its sequences, recomputed, is not the "
                "update"
            )
        return plain
    except InvalidAnswerError as error:
        reason = one_line(f"the attack's answer is invalid: {error}")
        return Reconstruction.none(Status.FAILED, reason)


def _replayed(
    answer: Reconstruction, seen: Observation, model: LanguageModel, seconds: float
) -> Reconstruction:
    """Returns an answer with the result of making the client's steps again.

    Raises:
        InvalidAnswerError: It claims a proof that these steps do not confirm.
    """
    obstacle = replay.obstacle(seen)
    replayed = None
    if obstacle is None:
        replayed = replay.replay(model, answer.sequences or (), seen, seconds)
    remark = obstacle if replayed is None else replayed.remark()
    if answer.verified and (replayed is None or not replayed.verified):
        raise InvalidAnswerError(
            "it claims a proof that the client's steps on its sequences, made again, do not "
            f"confirm{'' if remark is None else f': {remark}'}"
        )
    if replayed is None:
        return answer
    own_reason = "" if replayed.verified else answer.reason
    return replace(
        answer,
        verified=replayed.verified,
        reason="; ".join(filter(None, [own_reason, remark])),
        diagnostics={**answer.diagnostics, **replayed.diagnostics()},
    )
