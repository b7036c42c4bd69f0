"""Scores how likely each of some texts was in the batch of an update.

Who was in, the attack is not told: it gets a shuffled list (`Knowledge.candidates`), and the audit
compares the scores with the truth.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator

from fedleak.attacks import AttackSetting
from fedleak.attacks.auto.evidence import weights
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.membership import scores
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel, absolute
from fedleak.training.observation import QUESTIONS, Observation


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Tells which texts of a list were in the update, also where noise hides what they say.

    Four scores of each text, the higher, the likelier: `residual`, the cosine of the update with
    the part of the text's gradient that no public text explains; `cosine`, that of all of its
    gradient; `loss`, how well the broadcast model fits it; `loss_drop`, how much better it is
    fitted after the update.

    Attributes:
        candidates: A csv, tsv, jsonl or parquet file with a column `text` and, for a classifier, a
            column `label`: the texts that are asked about. Left out: the texts of each batch, and
            as many held-out ones.
    """

    kind: ClassVar[str] = "membership"
    uses: ClassVar[frozenset[str]] = QUESTIONS
    candidates: Annotated[str, AfterValidator(absolute)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs texts to ask about, and a parameter whose gradient can be compared."""
        if not setting.knows >= QUESTIONS:
            return (
                'needs a list of texts to ask about: kind = "membership" in an experiment file '
                "gets one from the audit"
            )
        if not setting.shared - {setting.family.word_embedding}:
            return "needs a parameter beside the word embedding: add one to update.share"
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
        if not weights(model, gradient):
            return Reconstruction.none(
                Status.ABSTAINED, "the update is zero wherever gradients can be compared"
            )
        cosine_K, residual_K = scores.cosines(model, candidates, gradient)
        loss_K = scores.losses(model, candidates.listed)
        rate = seen.knowledge.learning_rate or 1.0
        after_K = scores.losses(scores.stepped(model, gradient, rate), candidates.listed)
        tensors = {
            "residual": residual_K,
            "cosine": cosine_K,
            "loss": -loss_K,
            "loss_drop": loss_K - after_K,
        }
        finite = {name: value for name, value in tensors.items() if bool(value.isfinite().all())}
        return Reconstruction(
            status=Status.RECOVERED,
            scores={name: tuple(value.tolist()) for name, value in finite.items()},
            diagnostics={
                "listed": len(candidates.listed),
                "public": len(candidates.public),
                "left_out": sorted(tensors.keys() - finite.keys()),
            },
        )
