"""DLG: find inputs whose gradient is the observed one.

Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1, on word embeddings, with
Adam in place of L-BFGS (as TAG and LAMP do for text). Soft labels are optimised along with the
inputs unless they were granted. The embedding's own gradient is left out of the match, as it is
not a function of the embeddings that are optimised.

Shapes: B sequences, T tokens, D hidden size, C classes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import Setting
from fedleak.attacks.rows import used_rows
from fedleak.models import CLASSIFICATION, LanguageModel, batch_loss
from fedleak.observation import Observation, UpdateKind
from fedleak.reconstruction import Reconstruction, Status


@dataclass(frozen=True)
class Dlg:
    """Plain gradient matching with a squared (L2) distance: the baseline of the field.

    Attributes:
        steps: Adam steps.
        step_size: Adam's learning rate on embeddings, in units of the embeddings' deviation.
    """

    kind: ClassVar[str] = "dlg"
    uses: ClassVar[frozenset[str]] = frozenset({"labels", "lengths"})
    steps: Annotated[int, Field(ge=1)] = 300
    step_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1

    def obstacle(self, setting: Setting) -> str | None:
        """Needs a classifier's gradient, and lengths from the threat model or the positions."""
        if setting.update != UpdateKind.GRADIENT:
            return "matches gradients, and clients send weight deltas: use algorithm = 'fedsgd'"
        if setting.task != CLASSIFICATION:
            return "has next-token targets to find too: use task = 'sequence-classification'"
        if not setting.shared - {setting.family.word_embedding}:
            return "needs a parameter beside the word embedding: add one to update.share"
        position = setting.family.position_embedding
        if "lengths" not in setting.knows and position not in setting.shared:
            needs = "needs to know how long sequences are: add 'lengths' to threat.knows"
            # Rotary models have no such parameter, and adapters are sent without it.
            can_be_sent = position in setting.trained
            return f"{needs}, or {position} to update.share" if can_be_sent else needs
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the tokens nearest to the embeddings that were found."""
        lengths = _lengths(seen, model)
        if lengths is None:
            return Reconstruction.none(Status.ABSTAINED, "no position row stands out")
        target, matched = _targets(seen, model)
        size = float(sum(t.double().square().sum() for t in target))
        if not size > 0:
            return Reconstruction.none(Status.ABSTAINED, "the update is zero: nothing to match")
        mask_BT = _mask(lengths, model.device)
        table_VD = model.module.get_parameter(model.family.word_embedding).detach()
        shape = (*mask_BT.shape, table_VD.shape[1])
        embeds_BTD = torch.randn(shape, generator=rng).to(model.device) * table_VD.std()
        embeds_BTD.requires_grad_()
        labels_BC = _labels(seen, model, rng)
        free = [embeds_BTD] + ([labels_BC] if labels_BC.requires_grad else [])
        optimiser = torch.optim.Adam(free, lr=self.step_size * float(table_VD.std()))
        loss = torch.tensor(0.0)
        for _ in range(self.steps):
            optimiser.zero_grad()
            loss = l2_distance(
                gradient_of(model, matched, embeds_BTD, mask_BT, _probabilities(labels_BC)), target
            )
            loss.backward(inputs=free)  # type: ignore[no-untyped-call]
            optimiser.step()
        ids_BT = nearest_tokens(embeds_BTD.detach(), table_VD)
        sequences = [tuple(ids_BT[b, :n].tolist()) for b, n in enumerate(lengths)]
        return Reconstruction(
            Status.RECOVERED,
            sequences=tuple(sequences),
            evidence=(float(loss.detach()),) * len(sequences),
            tokens=tuple(sorted({token for one in sequences for token in one})),
            diagnostics={"relative_loss": float(loss.detach()) / size, "steps": self.steps},
        )


def gradient_of(
    model: LanguageModel,
    parameters: Sequence[Tensor],
    embeds_BTD: Tensor,
    mask_BT: Tensor,
    labels_BC: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradient of the loss in `parameters`, itself differentiable in the inputs."""
    ids_BT = torch.zeros_like(mask_BT)  # not read: a classifier's targets are its labels
    loss = batch_loss(model, ids_BT, mask_BT, labels_BC, embeds_BTD=embeds_BTD)
    return torch.autograd.grad(loss, list(parameters), create_graph=True, materialize_grads=True)


def l2_distance(gradient: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Returns the squared distance, summed over parameters (DLG, equation 4)."""
    return torch.stack(
        [(g - t).square().sum() for g, t in zip(gradient, target, strict=True)]
    ).sum()


def nearest_tokens(embeds_BTD: Tensor, table_VD: Tensor) -> Tensor:
    """Returns the token ids [B, T] whose embeddings have the largest cosine."""
    cosine_BTV = F.normalize(embeds_BTD, dim=-1) @ F.normalize(table_VD, dim=-1).T
    return cosine_BTV.argmax(-1)


def _targets(seen: Observation, model: LanguageModel) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the observed gradients to match, and the parameters that they belong to."""
    names = [name for name in seen.update.tensors if name != model.family.word_embedding]
    target = [seen.update.tensors[name].to(model.device) for name in names]
    return target, [model.module.get_parameter(name) for name in names]


def _lengths(seen: Observation, model: LanguageModel) -> tuple[int, ...] | None:
    """Returns a length for each sequence: granted, else the longest, from the position rows."""
    if seen.knowledge.lengths is not None:
        return seen.knowledge.lengths
    position = model.family.position_embedding
    used = None if position is None else used_rows(seen.update.tensors[position])
    return None if used is None else (used[0][-1] + 1,) * seen.update.num_examples


def _mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns the attention mask [B, T] of these lengths."""
    columns_T = torch.arange(max(lengths), device=device)
    return (columns_T < torch.tensor(lengths, device=device)[:, None]).long()


def _labels(seen: Observation, model: LanguageModel, rng: torch.Generator) -> Tensor:
    """Returns the granted classes [B], or logits [B, C] to be optimised."""
    if seen.knowledge.labels is not None:
        return torch.tensor(seen.knowledge.labels, device=model.device)
    shape = (seen.update.num_examples, model.num_labels)
    return torch.randn(shape, generator=rng).to(model.device).requires_grad_()


def _probabilities(labels: Tensor) -> Tensor:
    return labels.softmax(-1) if labels.requires_grad else labels
