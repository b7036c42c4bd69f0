"""Reference updates as a null for membership: LiRA (Carlini et al. 2022), offline.

Whoever knows how a client steps can make updates of other texts. None of them has a candidate in
it, so what they say of it is what chance says: their mean is taken off the candidate's statistic,
and the difference is divided by their standard deviation. Each candidate has its own mean. The
deviation is that of all candidates together, because a few references do not tell it of each (the
paper's "fixed variance"). LiRA online makes references with each candidate, too; that would take as
many trainings again for every candidate.

A gradient that public texts explain says nothing of a candidate. So texts of references cannot be
those that explain: every second public text is kept for references.

Shapes: K candidates, R references.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedleak.attacks import replay
from fedleak.attacks.membership.likelihood import statistics
from fedleak.models import LanguageModel
from fedleak.training.observation import ClientUpdate, Example, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.steps import Batch, gradient


def obstacle(seen: Observation, public: Sequence[Example]) -> str | None:
    """Returns why no references can be made, or None."""
    recipe, needed = seen.knowledge.recipe, seen.update.num_examples
    if seen.client < 0:
        return "references are updates of one client, and this is a sum over clients"
    if recipe is not None and recipe.optimiser == "other":
        return "the client's optimiser is not known"
    if (kept := len(public) // 2) < 2 * needed:
        return (
            f"a reference needs {needed} texts, and {kept} of {len(public)} public ones are kept "
            "for references, which must be twice as many, or references are alike: raise "
            "data.held_out"
        )
    stepped = seen.update.kind != UpdateKind.GRADIENT
    if stepped and not any(replay.passes_and_sizes(seen, needed)):
        return f"no passes over {needed} texts make the client's number of steps"
    return None


def lira(
    model: LanguageModel,
    seen: Observation,
    listed: Sequence[Example],
    public: Sequence[Example],
    count: int,
    rng: torch.Generator,
) -> Tensor:
    """Returns how far each candidate's statistic is from those of `count` references [K].

    Args:
        model: At the broadcast weights.
        seen: The update.
        listed: The candidates.
        public: Texts that are in no update.
        count: References.
        rng: Draws the texts of each reference.
    """
    texts = public[1::2]
    size = seen.update.num_examples
    made = [
        reference(model, seen, [texts[i] for i in torch.randperm(len(texts), generator=rng)[:size]])
        for _ in range(count)
    ]
    own, *others = statistics(model, [listed] * (count + 1), public[::2], [seen, *made])
    others_RK = torch.stack([other.residual_K for other in others])
    return (own.residual_K - others_RK.mean(0)) / others_RK.var(0).mean().sqrt()


def reference(model: LanguageModel, seen: Observation, texts: Sequence[Example]) -> Observation:
    """Returns the update that a client would have sent that has these texts.

    Noise, masks and dropout are left out, as far as a client applied them.
    """
    batch = Batch([text.ids for text in texts], [text.label or 0 for text in texts])
    if seen.update.kind == UpdateKind.GRADIENT:
        of_batch = gradient(model, batch, seen.knowledge.recipe or Recipe())
        tensors = {name: of_batch[name] for name in seen.update.tensors}
    else:
        start = next(replay.arrangements(batch.sequences, seen))
        batches = replace(start, labels=tuple(batch.labels)).batches(batch.sequences)
        tensors = replay.steps_again(model, batches, seen)
    return replace(seen, update=ClientUpdate(seen.update.kind, tensors, len(texts)))
