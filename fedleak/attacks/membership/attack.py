"""Scores how likely each of some texts was in the batch of an update.

Who was in, the attack is not told: it gets a shuffled list (`Knowledge.candidates`), and the audit
compares the scores with the truth.

Two scores compare each text's gradient with the update: `likelihood.py` has them.

The losses are the older question (Yeom et al. 2018): is the text fitted well, and does one step
along the update fit it better?

Shapes: K candidates.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedleak.attacks import AttackSetting
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.membership.likelihood import compared, statistics
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel, absolute, example_losses, pad
from fedleak.training.observation import QUESTIONS, Example, Observation

AT_ONCE = 32
"""Texts whose losses are computed together."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Tells which texts of a list were in the update, also where noise hides what they say.

    Four scores of each text, the higher, the likelier: `residual`, how much likelier the update is
    with the text in it, by the part of its gradient that no public text explains; `cosine`, that
    of its gradient with the update; `loss`, how well the broadcast model fits it; `loss_drop`, how
    much better it is fitted after the update.

    Attributes:
        candidates: A csv, tsv, jsonl or parquet file with a column `text` and, for a classifier, a
            column `label`: the texts that are asked about. Left out: the texts of each batch, and
            as many held-out ones.
    """

    kind: ClassVar[str] = "membership"
    version: ClassVar[int] = 3
    uses: ClassVar[frozenset[str]] = QUESTIONS
    candidates: Annotated[str, AfterValidator(absolute)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs texts to ask about."""
        if not setting.knows >= QUESTIONS:
            return (
                'needs a list of texts to ask about: kind = "membership" in an experiment file '
                "gets one from the audit"
            )
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the scores of all candidates."""
        candidates = seen.knowledge.candidates
        assert candidates is not None
        if not candidates.listed:
            return Reconstruction.none(
                Status.ABSTAINED,
                "the list of candidates is empty: no held-out text of its class is left to stand "
                "beside a text of the batch: raise data.held_out",
            )
        gradient = as_gradient(seen)
        if not compared(model, gradient):
            return Reconstruction.none(
                Status.ABSTAINED, "the update is zero wherever gradients can be compared"
            )
        with_update = statistics(model, candidates.listed, candidates.public, seen)
        loss_K = losses(model, candidates.listed)
        rate = seen.knowledge.learning_rate or 1.0
        after_K = losses(stepped(model, gradient, rate), candidates.listed)
        tensors = {
            "residual": with_update.residual_K,
            "cosine": with_update.cosine_K,
            "loss": -loss_K,
            "loss_drop": loss_K - after_K,
        }
        finite = {name: value for name, value in tensors.items() if bool(value.isfinite().all())}
        return Reconstruction(
            status=Status.RECOVERED,
            scores={name: tuple(value.tolist()) for name, value in finite.items()},
            diagnostics={
                "listed": len(candidates.listed),
                "public": with_update.public,
                "left_out": sorted(tensors.keys() - finite.keys()),
            },
        )


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
