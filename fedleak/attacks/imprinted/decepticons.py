"""decepticons: the texts of a batch out of a model of the server mode of that name.

As Fowl et al. (2022) read it: neighbouring rows of the feed-forward matrices differ by the inputs
of the tokens in a bin. These are clustered into texts by their tags. In each text they are assigned
to positions, and places that are left empty are filled with the nearest input of the text.

The authors' code uses facts that a server does not have. It is changed at these points:

- It is given the length that all texts are padded to, and clusters into groups no larger than that.
  Here clusters are of any size, and a text ends with the word that ends every text, or where no
  more inputs fit.
- It is given, or estimates, how often each word occurs, and assigns words once each. Here words are
  those of the embedding's rows that have a gradient, each as often as it fits.
- It assigns positions first and then words, as its random model keeps the two apart. Here a place
  fits an input as well as the best word at it does.

The number of texts is the number of examples that the client sends.

Shapes: C inputs, D hidden size, K numbers of a tag, L numbers outside of it, V words, T places.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.imprinted.answer import NO_TOKEN, answered, not_served
from fedleak.attacks.imprinted.bins import Words, read_bins
from fedleak.attacks.imprinted.checksum import Text
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.server_modes.decepticons import Decepticons, blocks, planted
from fedleak.attacks.server_modes.imprint import Planted
from fedleak.attacks.server_modes.sectors import as_linear
from fedleak.models import LanguageModel
from fedleak.models.family import TokenTable
from fedleak.training.observation import Observation

_FITS = 0.9
"""Correlation from which on an input is taken for a word at a place behind all others."""

_EXACT = 0.999
"""Correlation from which on it is beyond doubt, so that a proof is tried."""


@dataclass(frozen=True)
class DecepticonsReader:
    """Texts of a batch as Fowl et al. (2022) read them, where the server sent such a model."""

    kind: ClassVar[str] = "decepticons"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a model that was changed so, and the gradients of its feed-forward layers."""
        if reason := not_served(setting, Decepticons, "a model that was changed for it"):
            return reason
        if setting.response:
            return (
                "needs a loss at each token, and the loss counts responses alone: let the server "
                "use server.mode = 'imprint', or leave model.response_template out"
            )
        return setting.lacks(setting.family.modules(0)["f"][0])

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the first feed-forward matrices, both embeddings, and the classifier."""
        family = setting.family
        first = {family.modules(layer)["f"][0] for layer in range(setting.num_layers)}
        return setting.tables | first | {*family.classifier}

    @torch.no_grad()
    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts, the best ones first."""
        known = planted(model)
        if known is None:
            reason = "the blocks of this model were not changed by the mode decepticons"
            return Reconstruction.abstained(reason)
        input_CD = _inputs(model, certificate.as_gradient(seen), known)
        if not len(input_CD):
            return Reconstruction.abstained(NO_TOKEN)
        table = model.family.token_table(model.module)
        words = Words.of(model, seen, table)
        tag = len(known[0].shift_K)
        fit_CT, word_CT = _fits(input_CD[:, tag:-1], words, table, tag)
        clusters = list(_clusters(input_CD[:, :tag], seen.update.num_examples))
        opening, closing = words.marks(model)
        texts = [
            _text(fit_CT[cluster_C], word_CT[cluster_C], opening, closing) for cluster_C in clusters
        ]
        numbers = {"inputs": len(input_CD), "clusters": len(clusters)}
        return answered(seen, model, words.ids_V.tolist(), texts, numbers, alone=False)


def _inputs(model: LanguageModel, tensors: dict[str, Tensor], known: list[Planted]) -> Tensor:
    """Returns the inputs [C, D] that the bins of all blocks hold, each of length 1."""
    inputs = []
    for block, own in zip(blocks(model), known, strict=True):
        name = model.family.modules(block)["f"][0]
        if name not in tensors:
            continue
        bins = read_bins(as_linear(model, name, tensors[name]), own)
        # Above the last edge of a block are all the tokens that the next blocks tell apart.
        last = len(bins.sum_ND) - 1 if own is not known[-1] else -1
        inputs.append(bins.sum_ND[[number for number in bins.used() if number != last]])
    input_CD = torch.cat(inputs).double()
    return F.normalize(input_CD, dim=1, eps=0.0).float()


def _centred(rows_XL: Tensor) -> Tensor:
    """Returns rows whose inner products are correlations."""
    return F.normalize(rows_XL - rows_XL.mean(1, keepdim=True), dim=1)


def _fits(input_CL: Tensor, words: Words, table: TokenTable, tag: int) -> tuple[Tensor, Tensor]:
    """Returns how well the best word at each place fits each input, and that word [C, T].

    The norm's factor and mean are none of a row's direction, so rows need none.
    """
    unit_CL, ids_V = _centred(input_CL), words.ids_V.to(table.token_VD.device)
    fits, best = [], []
    for place in range(words.places):
        row_VD = table.embed(ids_V, torch.full_like(ids_V, place)).cpu()
        fit_C, word_C = (unit_CL @ _centred(row_VD[:, tag:-1]).T).abs().max(1)
        fits.append(fit_C)
        best.append(word_C)
    return torch.stack(fits, 1), torch.stack(best, 1)


def _clusters(tag_CK: Tensor, texts: int) -> Iterator[Tensor]:
    """Yields the inputs of each text, as numbers: those whose tags correlate."""
    from scipy.cluster.hierarchy import fcluster, linkage  # here, because it takes a while
    from scipy.spatial.distance import squareform

    if len(tag_CK) == 1:
        yield torch.zeros(1, dtype=torch.long)
        return
    unit_CK = _centred(tag_CK)
    # A bin's weight has any sign, and takes that of the tag with it.
    apart_CC = (1 - (unit_CK @ unit_CK.T).abs()).clamp_min(0).double().numpy()
    apart_X = squareform(apart_CC, checks=False)
    label_C = torch.tensor(fcluster(linkage(apart_X, "average"), texts, "maxclust"))
    for label in range(1, int(label_C.max()) + 1):
        yield (label_C == label).nonzero()[:, 0]


def _text(fit_CT: Tensor, word_CT: Tensor, opening: int | None, closing: int | None) -> Text:
    """Returns the text of a cluster: its inputs, each assigned to a place of its own.

    Args:
        fit_CT: How well an input fits a place.
        word_CT: With which word.
        opening, closing: The words that begin and end every text, if these are known.
    """
    from scipy.optimize import linear_sum_assignment  # here, because it takes a while

    own_X, place_X = map(torch.tensor, linear_sum_assignment(fit_CT.numpy(), maximize=True))
    fit_T, own_T = fit_CT.max(0)
    own_T[place_X] = own_X
    fit_T[place_X] = fit_CT[own_X, place_X]
    word_T = word_CT[own_T, torch.arange(len(own_T))]
    if opening is not None:  # in all texts alike, so in one bin
        word_T[0], fit_T[0] = opening, 1.0
    fitting = (fit_T >= _FITS).nonzero()[:, 0].tolist() or [int(place_X.max())]
    end = next((place for place in fitting if word_T[place] == closing), fitting[-1]) + 1
    worst = float(fit_T[:end].min())
    return Text(tuple(word_T[:end].tolist()), 1 - worst, 0.0 if worst >= _EXACT else math.inf)
