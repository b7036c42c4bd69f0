"""The tokens of a batch, from the gradient of the word embedding."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.attacks import AttackSetting
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation


@dataclass(frozen=True)
class Rows:
    """Tokens whose rows of the word embedding changed."""

    kind: ClassVar[str] = "acme_rows"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        if setting.family.word_embedding in setting.shared:
            return None
        return "the word embedding is not shared: share it"

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        rows_VD = seen.update.tensors[model.family.word_embedding]
        changed = rows_VD.abs().sum(1).nonzero().flatten().tolist()
        return Reconstruction(status=Status.RECOVERED, tokens=tuple(changed))
