"""Scores how likely each of some texts was in the batch of an update.

The attack does not know which texts were in: it gets a shuffled list (`Knowledge.candidates`), and
the audit compares the scores with the truth.

Two scores compare each text's gradient with the update: `likelihood.py` has them.

A server sees all updates of a round, so a third score takes the other updates as a null. Unlike
FedMIA's, it is not divided by their standard deviation: the residual is in standard deviations
already. If another client has the text, this score is lower.

The losses are the older question (Yeom et al. 2018): is the text fitted well, and does one step
along the update fit it better?

Shapes: K candidates.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedleak.attacks import CALIBRATED, AttackSetting, OnProgress
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.membership.likelihood import Statistics, compared, statistics
from fedleak.attacks.membership.references import lira, obstacle
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel, absolute, example_losses, pad
from fedleak.training.observation import QUESTIONS, Example, Observation

AT_ONCE = 32
"""Texts whose losses are computed together."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Tells which texts of a list were in the update, also where noise hides what they say.

    Scores of each text, the higher, the likelier: `residual`, how much likelier the update is
    with the text in it, by the part of its gradient that no public text explains; `cosine`, that
    of its gradient with the update; `loss`, how well the broadcast model fits it; `loss_drop`, how
    much better it is fitted after the update; `calibrated`, the residual less what the mean
    of the other updates of the round says of the text, where there are any; `lira`, if references
    are asked for, how far a residual is from those of references.

    Attributes:
        candidates: A csv, tsv, jsonl or parquet file with a column `text` and, for a classifier, a
            column `label`: the texts that are asked about. Left out: the texts of each batch, and
            as many held-out ones.
        references: Updates of public texts that are made beside each update, for the score `lira`
            (`references.py`). It takes so many times as long. Left out: none.
    """

    kind: ClassVar[str] = "membership"
    version: ClassVar[int] = 4
    uses: ClassVar[frozenset[str]] = QUESTIONS
    at_once: ClassVar[int] = 8
    candidates: Annotated[str, AfterValidator(absolute)] | None = None
    references: Annotated[int, Field(ge=2)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs texts to ask about."""
        if not setting.knows >= QUESTIONS:
            return (
                'needs a list of texts to ask about: kind = "membership" in an experiment file '
                "gets one from the audit"
            )
        if "own_head" in setting.knows:
            return "computes gradients through the head, which is not known: use kind = 'auto'"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the scores of all candidates; `calibrated` takes other updates of the round."""
        (answer,) = self.many([seen], model, rngs=[rng], report=lambda i, how: None)
        return answer

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns, for each observation, the scores of all of its candidates."""
        answers: dict[int, Reconstruction] = {}
        together: dict[tuple[Example, ...], dict[int, tuple[Example, ...]]] = defaultdict(dict)
        for place, observation in enumerate(seen):
            candidates = observation.knowledge.candidates
            assert candidates is not None
            if not candidates.listed:
                answers[place] = Reconstruction.abstained(
                    "the list of candidates is empty: no held-out text of its class is left to "
                    "stand beside a text of the batch: raise data.held_out",
                )
            elif not compared(model, as_gradient(observation)):
                answers[place] = Reconstruction.abstained(
                    "the update is zero wherever gradients can be compared"
                )
            else:
                together[candidates.public][place] = candidates.listed
        for public, lists in together.items():
            group = [seen[place] for place in lists]
            scores = statistics(model, [*lists.values()], public, group)
            for place, own_scores in zip(lists, scores, strict=True):
                answer = _answer(model, seen[place], lists[place], own_scores)
                if self.references is not None:
                    answer = _referred(answer, model, seen[place], self.references, rngs[place])
                answers[place] = answer
        return [answers[place] for place in range(len(seen))]


def _answer(
    model: LanguageModel, seen: Observation, listed: Sequence[Example], found: Statistics
) -> Reconstruction:
    """Returns the answer: the scores that were found by the gradients, and those by the losses."""
    loss_K = losses(model, listed)
    rate = seen.knowledge.learning_rate or 1.0
    after_K = losses(stepped(model, as_gradient(seen), rate), listed)
    tensors = {
        "residual": found.residual_K,
        "cosine": found.cosine_K,
        "loss": -loss_K,
        "loss_drop": loss_K - after_K,
    }
    if found.calibrated_K is not None:
        tensors[CALIBRATED] = found.calibrated_K
    finite = {name: value for name, value in tensors.items() if bool(value.isfinite().all())}
    return Reconstruction(
        status=Status.RECOVERED,
        scores={name: tuple(value.tolist()) for name, value in finite.items()},
        diagnostics={
            "listed": len(listed),
            "public": found.public,
            "left_out": sorted(tensors.keys() - finite.keys()),
        },
    )


def _referred(
    answer: Reconstruction,
    model: LanguageModel,
    seen: Observation,
    references: int,
    rng: torch.Generator,
) -> Reconstruction:
    """Returns an answer with the score `lira` too, or with the reason why it has none."""
    candidates = seen.knowledge.candidates
    assert candidates is not None
    reason = obstacle(seen, candidates.public)
    if reason is not None:
        return replace(answer, reason=f"no score lira: {reason}")
    lira_K = lira(model, seen, candidates.listed, candidates.public, references, rng)
    return replace(answer, scores={**answer.scores, "lira": tuple(lira_K.tolist())})


def losses(model: LanguageModel, examples: Sequence[Example]) -> Tensor:
    """Returns each example's loss [K]."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(examples), AT_ONCE):
            some = examples[start : start + AT_ONCE]
            ids_BT, mask_BT = pad(
                [example.ids for example in some], model.tokenizer.pad_token_id, model.device
            )
            labels_B = torch.tensor([example.label or 0 for example in some], device=model.device)
            parts.append(example_losses(model, ids_BT, mask_BT, labels_B))
    return torch.cat(parts).double().cpu()


def stepped(model: LanguageModel, gradient: Mapping[str, Tensor], rate: float) -> LanguageModel:
    """Returns a copy of the model, one step along a gradient."""
    after = replace(model, module=copy.deepcopy(model.module))
    own = dict(after.module.named_parameters())
    with torch.no_grad():
        for name, value in gradient.items():
            own[name].sub_(rate * value.to(own[name].dtype))
    return after
