"""Scores how likely each of some texts was in the batch of an update.

Who was in, the attack is not told: it gets a shuffled list (`Knowledge.candidates`), and the audit
compares the scores with the truth.

Gradients of texts of one class are much alike, so the product of a text's gradient with the update
is large whoever was in. What tells texts apart is the part of a gradient g that lies outside the
span of the gradients of public texts, `r = g - P g`: the residual score is the cosine of r with the
update u. With `<u, r> = <u, g> - c^T u_P`, `|r|^2 = |g|^2 - c^T k` and `c = K^+ k`, where K is the
Gram matrix of the public gradients, k their products with g, and u_P theirs with u, it takes inner
products only, and no gradient is formed (`auto.evidence`).

The losses are the older question (Yeom et al. 2018): is the text fitted well, and does one step
along the update fit it better?

Shapes: K candidates, P public texts, A = K + P of both.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedleak.attacks import AttackSetting
from fedleak.attacks.auto.evidence import Pairs, compare_labelled, weights
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel, absolute, example_losses, pad
from fedleak.training.observation import QUESTIONS, Candidates, Example, Observation

RANK = 1e-6
"""Directions of the public span below this share of the largest are rounding of float32."""

AT_ONCE = 32
"""Texts whose losses, or inner products, are computed together."""

_TINY = 1e-300


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
        cosine_K, residual_K = cosines(model, candidates, gradient)
        loss_K = losses(model, candidates.listed)
        rate = seen.knowledge.learning_rate or 1.0
        after_K = losses(stepped(model, gradient, rate), candidates.listed)
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


def products(
    model: LanguageModel, examples: Sequence[Example], observed: Mapping[str, Tensor]
) -> Pairs:
    """Returns the inner products of examples' gradients with each other and the observed one [A].

    Args:
        model: At the broadcast weights.
        examples: Candidates and public texts.
        observed: The mean gradient by parameter name.
    """
    labels_A1 = torch.tensor([[example.label or 0] for example in examples], device=model.device)
    return compare_labelled(model, [example.ids for example in examples], labels_A1, observed)


def cosines(
    model: LanguageModel, candidates: Candidates, observed: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the cosine [K] of each candidate with the observed gradient, and the residual's [K].

    Candidates are compared with public texts, not with each other, so a long list is taken in
    parts.

    Args:
        model: At the broadcast weights.
        candidates: Candidates and public texts.
        observed: The mean gradient by parameter name.
    """
    parts = []
    for start in range(0, len(candidates.listed), AT_ONCE):
        some = candidates.listed[start : start + AT_ONCE]
        pairs = products(model, [*some, *candidates.public], observed)
        parts.append((cosine(pairs, len(some)), residual(pairs, len(some))))
    whole, outside = zip(*parts, strict=True)
    return torch.cat(whole), torch.cat(outside)


def cosine(pairs: Pairs, count: int) -> Tensor:
    """Returns the cosine [K] of each of the first `count` gradients with the observed one."""
    square_K = pairs.gram_KK.diagonal()[:count]
    return pairs.observed_K[:count] / (square_K * pairs.total).clamp_min(_TINY).sqrt()


def residual(pairs: Pairs, count: int) -> Tensor:
    """Returns the cosine [K] with the observed one of what is outside the span of all others.

    Args:
        pairs: Of the candidates, then the public texts.
        count: How many are candidates.
    """
    gram_PP = pairs.gram_KK[count:, count:]
    gram_PK = pairs.gram_KK[count:, :count]
    c_PK = torch.linalg.pinv(gram_PP, rtol=RANK, hermitian=True) @ gram_PK
    inner_K = pairs.observed_K[:count] - pairs.observed_K[count:] @ c_PK
    own_K = pairs.gram_KK.diagonal()[:count]
    # A candidate inside the span has nothing that could be told apart.
    square_K = own_K - (gram_PK * c_PK).sum(0)
    outside_K = square_K > RANK * own_K
    return torch.where(outside_K, inner_K / (square_K * pairs.total).clamp_min(_TINY).sqrt(), 0.0)


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
