"""imprint: the texts of a batch out of a first block that a malicious server imprinted.

It knows nothing but the model that the client was sent and the update. Words and positions come
from the rows of both embeddings that have a gradient, if noise leaves these visible; else all words
are tried. What was planted is read from the model's weights (`server_modes.imprint.planted`).

A text is certified by itself, by its tag (`checksum`). The batch is proved as everywhere: its
gradient, recomputed at the model that was sent, is the update.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.imprinted.answer import NO_TOKEN, answered, not_served
from fedleak.attacks.imprinted.bins import Bins, Words, pick, read_bins
from fedleak.attacks.imprinted.chains import Chains
from fedleak.attacks.imprinted.checksum import Checksum, read_texts
from fedleak.attacks.imprinted.slots import MOST, Slots, fill_
from fedleak.attacks.imprinted.tags import Split, more_tags, read_tags, splits, without_mixtures
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.server_modes import sectors
from fedleak.attacks.server_modes.imprint import Imprint, planted
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation

NOT_IMPRINTED = "the first block of this model is not imprinted"


@dataclass(frozen=True)
class ImprintReader:
    """Texts of large batches, each with a checksum, where the server sent an imprinted model."""

    kind: ClassVar[str] = "imprint"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a model that was imprinted, and the gradient of its first feed-forward layer."""
        obstacle = not_served(setting, Imprint, "a model that was imprinted")
        return obstacle or setting.lacks(setting.family.modules(0)["f"][0])

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the imprinted matrix, both embeddings, and the classifier for the proof."""
        family = setting.family
        return setting.tables | {*family.modules(0)["f"], *family.classifier}

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts, the certified ones first."""
        tensors = certificate.as_gradient(seen)
        if model.family.causal:
            return _read_chains(seen, model, tensors, rng)
        known = planted(model)
        if known is None:
            return Reconstruction.abstained(NOT_IMPRINTED)
        (first,) = model.family.modules(0)["f"]
        bins = read_bins(tensors[first], known)
        words = Words.of(model, seen, model.family.token_table(model.module))
        exact, numbers = _exact(bins, words, len(known.project_KD), rng)
        tags = read_tags(exact)
        if tags is None:
            return Reconstruction.abstained(NO_TOKEN, **numbers)
        opening, closing = words.marks(model)
        tags = without_mixtures(more_tags(exact, tags))
        slots = Slots(torch.empty(0, words.places, dtype=torch.long), {}, bins.used())
        while (more := len(tags.tag_SK) - len(slots.word_ST)) > 0:
            slots.add_texts_(more, opening)
            if slots.word_ST.numel() * len(words.ids_V) > MOST:
                reason = "the table of all words at all places of all texts would be too large"
                return Reconstruction.abstained(reason, **numbers)
            fill_(slots, bins, words, known, tags, closing, rng)
            unread = [part for part in exact if part.bin in slots.left]
            tags = more_tags(unread, tags, slots.word_ST)
        checksum = Checksum(words.whole() @ known.project_KD.T + known.shift_K, tags.spread())
        read = read_texts(slots.word_ST, checksum, tags, opening, closing)
        numbers |= {"explained": len(slots.members), "tags": len(tags.tag_SK)}
        # Half precision rounds bins by more than a checksum can bear.
        precise = certificate.precision(seen) <= certificate.PRECISION
        return answered(seen, model, words.ids_V.tolist(), read, numbers, alone=precise)


def _exact(
    bins: Bins, words: Words, size: int, rng: torch.Generator
) -> tuple[list[Split], dict[str, Any]]:
    """Returns the bins that few tokens explain, beside tags of some size, and diagnostics."""
    exact = splits(bins, words, pick(bins, words, size, rng), size)
    return exact, {"noise": bins.noise(), "bins": len(bins.used())}


@torch.no_grad()
def _read_chains(
    seen: Observation, model: LanguageModel, tensors: Mapping[str, Tensor], rng: torch.Generator
) -> Reconstruction:
    """Returns the texts of a causal model, the certified ones first."""
    known = sectors.planted(model)
    if known is None:
        return Reconstruction.abstained(NOT_IMPRINTED)
    first = model.family.modules(0)["f"][0]
    bins = read_bins(sectors.as_linear(model, first, tensors[first]), known)
    table = model.family.token_table(model.module)
    words = Words.of(model, seen, sectors.Stream.of(table, known))
    exact, numbers = _exact(bins, words, len(known.project_KD), rng)
    if not exact:
        return Reconstruction.abstained(NO_TOKEN, **numbers)
    everything = words
    if len(words.ids_V) == model.vocabulary:  # which words are used is not known
        named_V = torch.unique(torch.cat([part.word_M for part in exact]))
        words = replace(words, ids_V=words.ids_V[named_V])
        exact = [part._replace(word_M=torch.searchsorted(named_V, part.word_M)) for part in exact]
    opening, _ = words.marks(model)
    chains = Chains(bins, words, everything, known, exact, table, opening)
    chains.grow_()
    numbers["tokens read"] = len(chains.tree.words) - 1
    return answered(seen, model, words.ids_V.tolist(), chains.texts(), numbers, alone=False)
