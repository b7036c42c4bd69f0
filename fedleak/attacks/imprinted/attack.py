"""imprint: the texts of a batch out of a first block that a malicious server imprinted.

It knows nothing but the model that the client was sent and the update. Words and positions come
from the rows of both embeddings that have a gradient, if noise leaves these visible; else all words
are tried. What was planted is read from the model's weights (`server_modes.imprint.planted`).

A text is certified by itself, by its tag (`checksum`). The batch is proved as everywhere: its
gradient, recomputed at the model that was sent, is the update.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.imprinted.answer import NO_TOKEN, answered, not_served
from fedleak.attacks.imprinted.bins import Words, pick, read_bins
from fedleak.attacks.imprinted.chains import Chains
from fedleak.attacks.imprinted.checksum import Checksum, read_texts
from fedleak.attacks.imprinted.slots import MOST, Slots, fill_
from fedleak.attacks.imprinted.tags import more_tags, read_tags, splits, without_mixtures
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.server_modes import sectors
from fedleak.attacks.server_modes.imprint import Imprint, planted
from fedleak.attacks.server_modes.sectors import Sectors, Stream
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation


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

    @torch.no_grad()
    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts, the certified ones first."""
        known = sectors.planted(model) if model.family.causal else planted(model)
        if known is None:
            return Reconstruction.abstained("the first block of this model is not imprinted")
        first, table = model.family.modules(0)["f"][0], model.family.token_table(model.module)
        gradient_ND = sectors.as_linear(model, first, certificate.as_gradient(seen)[first])
        bins, size = read_bins(gradient_ND, known), len(known.project_KD)
        inputs = Stream.of(table, known) if isinstance(known, Sectors) else table
        words = Words.of(model, seen, inputs)
        exact = splits(bins, words, pick(bins, words, size, rng), size)
        numbers: dict[str, Any] = {"noise": bins.noise(), "bins": len(bins.used())}
        if not exact:
            return Reconstruction.abstained(NO_TOKEN, **numbers)
        if isinstance(known, Sectors):
            chains = Chains(bins, words, known, exact, model)
            chains.grow_()
            numbers["tokens read"] = len(chains.tree.words) - 1
            ids_V = chains.words.ids_V.tolist()
            return answered(seen, model, ids_V, chains.texts(), numbers, alone=False)
        tags = read_tags(exact)
        if tags is None:
            return Reconstruction.abstained(NO_TOKEN, **numbers)
        opening, closing = words.marks(model)
        tags = without_mixtures(more_tags(exact, tags))
        slots = Slots(torch.empty(0, words.places, dtype=torch.long), bins.used())
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
        explained = numbers["bins"] - len(slots.left)
        numbers |= {"explained": explained, "tags": len(tags.tag_SK)}
        # Half precision rounds bins by more than a checksum can bear.
        precise = certificate.precision(seen) <= certificate.PRECISION
        return answered(seen, model, words.ids_V.tolist(), read, numbers, alone=precise)
