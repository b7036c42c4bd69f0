"""imprint: the texts of a batch out of a first block that a malicious server imprinted.

It knows nothing but the model that the client was sent and the update. Words and positions come
from the rows of both embeddings that have a gradient, where noise leaves these; else all words are
tried. What was planted in the model stands in its weights (`server_modes.imprint.planted`).

A text is certified by itself, by its tag (`checksum`). The batch is proved as everywhere: its
gradient, recomputed at the model that was sent, is the update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.analytic.embedding_rows import used_rows
from fedleak.attacks.certificate import PRECISION
from fedleak.attacks.clock import UNLIMITED
from fedleak.attacks.imprinted.bins import Words, pick, read_bins
from fedleak.attacks.imprinted.checksum import Checksum, Text, read_texts
from fedleak.attacks.imprinted.slots import MOST, Slots, fill_
from fedleak.attacks.imprinted.tags import more_tags, read_tags, splits, without_mixtures
from fedleak.attacks.matching.batch_structure import frame
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel
from fedleak.server_modes.imprint import Imprint, planted
from fedleak.training.observation import Observation, UpdateKind

_PLACES = 40
"""Positions that are considered where it is not known how many were used."""


@dataclass(frozen=True)
class ImprintReader:
    """Texts of large batches, each with a checksum, where the server sent an imprinted model."""

    kind: ClassVar[str] = "imprint"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a model that was imprinted, and the gradient of its first feed-forward layer."""
        if setting.server_mode != Imprint.kind:
            return (
                f"the model was not imprinted: let the server do so, server.mode = {Imprint.kind!r}"
            )
        if setting.family.feed_forward_norm is None:
            return (
                f"reads imprinted models like BERT, not {setting.family.model_type}: choose "
                "another model.name"
            )
        (name,) = setting.family.modules(0)["f"]
        if name not in setting.shared:
            return f"needs {name}, and clients send none: see update.share"
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the imprinted matrix, both embeddings, and the classifier for the proof."""
        family = setting.family
        names = (*family.modules(0)["f"], family.word_embedding, *family.classifier)
        return frozenset(n for n in (*names, family.position_embedding) if n is not None)

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts, the certified ones first."""
        known, tensors = planted(model), certificate.as_gradient(seen)
        if known is None:
            reason = "the first block of this model is not imprinted"
            return Reconstruction.none(Status.ABSTAINED, reason)
        (first,) = model.family.modules(0)["f"]
        bins = read_bins(tensors[first], known)
        words = _words(model, seen)
        size = len(known.project_KD)
        picked = pick(bins, words, slice(size, None), rng)
        exact = splits(bins, words, picked, size)
        tags = read_tags(exact)
        numbers: dict[str, Any] = {"noise": bins.noise(), "bins": len(bins.used())}
        if tags is None:
            reason = "no bin of the imprinted layer holds a single token: noise, or too many tokens"
            return Reconstruction.none(Status.ABSTAINED, reason, **numbers)
        opening, closing = words.marks(frame(model))
        tags = without_mixtures(more_tags(exact, tags))
        slots, texts = Slots.none(bins, words), 0
        while len(tags.tag_SK) > texts:
            slots.add_texts_(len(tags.tag_SK) - texts, opening)
            texts = len(tags.tag_SK)
            if slots.word_ST.numel() * len(words.ids_V) > MOST:
                reason = "the table of all words at all places of all texts would be too large"
                return Reconstruction.none(Status.ABSTAINED, reason, **numbers)
            fill_(slots, bins, words, known, tags, closing, rng)
            unread = [part for part in exact if part.bin in slots.left]
            tags = more_tags(unread, tags, slots.word_ST)
        checksum = Checksum(words.whole() @ known.project_KD.T + known.shift_K, tags.spread())
        read = read_texts(slots.word_ST, checksum, tags, opening, closing)
        numbers |= {"explained": len(slots.members), "tags": len(tags.tag_SK)}
        return _answer(seen, model, words.ids_V.tolist(), read, numbers)


def _words(model: LanguageModel, seen: Observation) -> Words:
    """Returns the words and positions that have a gradient, or all where these may be lost.

    The imprint takes most of the update, so that the embeddings' gradients are small: half
    precision makes zeros of them, and a delta is rounded as the weights are.
    """
    family, update = model.family, seen.update
    word, place = (
        used_rows(update.tensors[name]) if name is not None and name in update.tensors else None
        for name in (family.word_embedding, family.position_embedding)
    )
    precise = update.kind == UpdateKind.GRADIENT and certificate.precision(seen) <= PRECISION
    if not (precise and word and word.complete and place):
        places = min(_PLACES, model.max_length)
        return Words(family.token_table(model.module), torch.arange(model.vocabulary), places)
    return Words(family.token_table(model.module), torch.tensor(word.rows), place.rows[-1] + 1)


def _answer(
    seen: Observation,
    model: LanguageModel,
    ids_V: Sequence[int],
    texts: Sequence[Text],
    numbers: Mapping[str, Any],
) -> Reconstruction:
    """Returns the texts, the certified ones first, and what the whole gradient proves of them."""
    size = seen.update.num_examples
    best = sorted(texts, key=Text.doubt)[:size]
    sequences = [tuple(ids_V[word] for word in text.words if word is not None) for text in best]
    certified = [ids for ids, text in zip(sequences, best, strict=True) if text.certified]
    numbers = {**numbers, "certified": len(certified)}
    if not sequences:
        reason = "no text was read: the bins name too few words of each"
        return Reconstruction.none(Status.ABSTAINED, reason, **numbers)
    verdict = certificate.NOTHING_PROVED
    if certificate.is_linear(seen) and len(certified) == len(sequences):
        members = certificate.explain(model, list(dict.fromkeys(certified)), seen, UNLIMITED)
        verdict = certificate.verify(model, members, seen, UNLIMITED)
    if verdict.verified:
        sequences = [ids for ids, times in verdict.repeats.items() for _ in range(times)]
    doubts = [0.0] * size if verdict.verified else [text.doubt() for text in best]
    return Reconstruction(
        status=Status.RECOVERED,
        sequences=tuple(sequences),
        evidence=tuple(doubts),
        tokens=tuple(sorted({token for ids in sequences for token in ids})),
        diagnostics={
            **numbers,
            **verdict.diagnostics(),
            "chance": max((text.chance for text in best if text.certified), default=None),
        },
        verified=verdict.verified,
        reason=verdict.remark()
        if verdict.verified
        else f"the batch is not proved; {len(certified)} of its texts are certified by their tags",
    )
