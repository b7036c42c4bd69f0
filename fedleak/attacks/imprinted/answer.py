"""The answer of an attack on an imprinted model: texts, and what proves them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.imprinted.checksum import Text
from fedleak.attacks.reconstruction import Reconstruction, tokens_of
from fedleak.attacks.server_modes import ServerMode
from fedleak.attacks.subspace.answer import answer_of
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation

NO_TOKEN = "no bin of the imprinted layer holds a single token: noise, or too many tokens"


def not_served(setting: AttackSetting, mode: type[ServerMode], needed: str) -> str | None:
    """Returns that the server did not do what an attack reads; None if it did.

    Args:
        setting: What is attacked.
        mode: What the server has to do.
        needed: What comes of it, such as "a model that was changed for it".
    """
    if setting.server_mode == mode.kind:
        return None
    return f"needs {needed}: let the server do so, server.mode = {mode.kind!r}"


def answered(
    seen: Observation,
    model: LanguageModel,
    ids_V: Sequence[int],
    texts: Sequence[Text],
    numbers: Mapping[str, Any],
    *,
    alone: bool,
) -> Reconstruction:
    """Returns the texts, the certified ones first, and what the whole gradient proves of them.

    If texts are not certified alone, the proof certifies all of them or none.
    """
    size = seen.update.num_examples
    best = sorted(texts, key=Text.doubt)[:size]
    sequences = [tuple(ids_V[word] for word in text.words if word is not None) for text in best]
    certified = [ids for ids, text in zip(sequences, best, strict=True) if text.certified]
    numbers = {**numbers, "certified": len(certified) if alone else 0}
    if not sequences:
        reason = "no text was read: the bins name too few words of each"
        return Reconstruction.abstained(reason, **numbers)
    whole = certified if len(certified) == len(sequences) else []
    verdict = certificate.judge(model, whole, seen)
    if verdict.verified:
        sequences = [ids for ids, times in verdict.repeats.items() for _ in range(times)]
        numbers["certified"] = len(sequences)
    doubts = [text.doubt() if alone else max(text.doubt(), 1.0) for text in best]
    return answer_of(
        [certificate.close(model, ids) for ids in sequences],
        [0.0] * size if verdict.verified else doubts,
        verdict,
        tokens=tokens_of(sequences),
        diagnostics={
            **numbers,
            "chance": max((text.chance for text in best if text.certified), default=None),
        },
        reason=f"the batch is not proved; {numbers['certified']} of its texts are certified",
    )
