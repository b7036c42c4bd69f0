"""Query gradients: whole texts of a batch, each from the equations of one of its words.

`query_equations` has the mathematics: a word that occurs once in a batch gives as many equations as
the model is wide, in which its own text is the only unknown, however long it is. Here they are made
from an update and solved, and the solutions are proved:

1. **Split.** Word row v of the embedding is the sum of the gradients d_i over the places of v, and
   position row q the sum over the words at q (`position_marginals`). Least squares over the
   directions of words and places splits the attention's gradients likewise (`token_bag`). So there
   are four tables of rows of words and rows of places, all of which add up over the same places.
   Over all tables, P pinv(W) has a 1 at the place of a word that occurs once, and more than by
   chance at the places of a word that occurs several times: these are the candidates.
2. **Read.** The equations of one word are solved for the weights of all candidates. Words that are
   still wrong are exchanged, by the equations of all words of the text that occur once.
3. **Prove.** A text whose own gradient explains its words' rows, with any weights of its logits, is
   in the batch: its rows are hundreds of numbers for each word against one number for each class.
4. **Peel.** It is subtracted, and the rest is split anew: words that two texts shared then occur
   once. In the end the gradient of the whole batch is recomputed.

The budget is that of `keyspan`: distinct words + places + 1 stay below the hidden size. Dropout
changes the layer's input, noise and local steps its gradients: then no text passes. Next-token
training with a tied output adds a term to the rows of words that hides d_i.

Shapes: V vocabulary, M words of the batch, T places, N words that occur once, J candidates, D
hidden size, F facts, C classes; X, Y: any axes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedleak.attacks import AttackSetting, Show, certificate
from fedleak.attacks.analytic.query_equations import (
    SOLVED,
    Candidates,
    Equation,
    Equations,
    best_of,
    loss,
    mended,
    relaxed,
)
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import (
    Judged,
    Reader,
    Reading,
    by_excess,
    likeliest,
    recovered,
    telling,
)
from fedleak.attacks.subspace.span import SPARE
from fedleak.models import LanguageModel
from fedleak.models.family import heads
from fedleak.training.observation import Observation
from fedleak.util.lists import grouped

_EMPTY = 1e-5
"""A row that is smaller than this, as a share of the largest one, belongs to no text."""

_ONCE = 0.5
"""A number of the table from here on belongs to a word that occurs once; such words are tried."""

_CLEAR = 0.8
"""From here on it is clear that the word stands nowhere else, until exchanges are tried."""

_PLAUSIBLE = 0.05
"""Below this share of a word's rows a place is a candidate only for exchanges."""

_TELLING = 16
"""Words of a text whose equations decide on exchanges."""

_ROUNDS = 3
"""Times that exchanges begin anew, with the words of the text as it is by then."""

_LIKELIEST = (0, 600, 1500)
"""Candidates, beside the plausible ones, from which the first, second and third try begins."""

_EXCHANGED = 4000
"""Candidates that exchanges bring in if the first ones were not enough."""

_DEARER = 4
"""How many tries cost as much as one of the next kind."""


@dataclass(frozen=True)
class QueryGradients(Reader):
    """Whole texts of a batch, however long, each from the gradient at one word's query.

    Attributes:
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "query_gradients"
    uses: ClassVar[frozenset[str]] = frozenset()
    seconds: Seconds | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs both embeddings and all of the first attention, of a classifier."""
        family = setting.family
        if setting.num_layers < 2:
            return "needs 2 layers, and the model has 1: choose another model.name"
        if family.position_embedding is None:
            return "reads learned positions, and the model's are rotary: use kind = 'dager'"
        if family.causal:
            return "reads encoders: use kind = 'keyspan' or 'dager'"
        missing = self._needed(setting) - setting.shared
        if missing:
            return f"needs {', '.join(sorted(missing))}, and clients send none: see update.share"
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads both embeddings, the first attention, and the classifier, which gives labels."""
        return self._needed(setting) | frozenset(setting.family.classifier)

    def _needed(self, setting: AttackSetting) -> frozenset[str]:
        return setting.tables | {*setting.family.attention_parameters(0)}

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the texts that the equations of their words leave."""
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        if not certificate.is_linear(seen):
            return Reading.none("needs one gradient without dropout, and the update is none")
        observed, size = certificate.as_gradient(seen), seen.update.num_examples
        needed = self._needed(AttackSetting.of(seen, model))
        whole = left = {name: observed[name] for name in observed if name in needed}
        first = parts = split(model, whole, whole)
        if isinstance(first, str):
            return Reading.none(first)
        read: dict[Ids, Text] = {}
        proved: list[Text] = []
        pulls: list[certificate.Pull] = []
        tried: dict[int, list[float]] = defaultdict(list)
        tries = 0
        while not isinstance(parts, str) and not clock.up():
            number = parts.next_word(tried)
            if number is None:
                break
            text = read_text(parts, number, clock, len(tried[number]))
            tell(len(proved), size, text)
            read[text.ids] = text
            tried[number].append(text.excess)
            tries += 1
            proof = explained(text, parts, model, left, whole) if text.solved else None
            if proof is not None:
                proved.append(read.pop(text.ids))
                pulls.append(proof.pull)
                left = {name: g - proof.gradient[name] for name, g in left.items()}
                parts = split(model, left, whole)
                tried.clear()
        counted = certificate.counted(model, pulls, size, whole=False)
        members = [known for known in counted.of_pulls if known is not None]
        verdict = certificate.verify(model, members, seen, clock)
        texts = likeliest(proved, sorted(read.values(), key=by_excess), verdict, size)
        tokens = tuple(first.words_M.sort().values.tolist())
        answer = recovered(
            texts,
            verdict,
            tokens=tokens,
            diagnostics={
                "budget": first.budget,
                "candidates": {
                    "words": len(tokens),
                    "once": len(first.equations.ids_N),
                    "pairs": len(first.plausible_L),
                    "tries": tries,
                    "proved": len(members),
                },
                **clock.late(),
            },
            reason="" if proved else "nothing proved: texts whose words' equations fail least",
        )
        return Reading.of(answer, members=tuple(members), tokens=tokens, scale=counted.scale)


@dataclass(frozen=True)
class Text(Judged):
    """A text that the equations of its words gave.

    Attributes:
        once: Its words that occur once and whose equations hold, by their numbers.
    """

    once: tuple[int, ...]

    @property
    def solved(self) -> bool:
        """Whether the equations of most of its words hold."""
        return self.excess < SOLVED


@dataclass(frozen=True)
class Split:
    """An update by words and places.

    Attributes:
        words_M: Distinct words.
        equations: Of the words that occur once.
        clear_N: How clearly each of these words occurs once.
        ids_J, place_J: All words at all places.
        prior_J: The number of the table for each, clamped between almost 0 and 1.
        number_J: The number of a candidate among the words that occur once; -1 if it is none.
        plausible_L: The candidates that the table supports.
        end_J: Whether a candidate ends a text: only these do.
        budget: Directions of words and places, and how many there is room for.
        project: (words, places) -> their keys and values.
    """

    words_M: Tensor
    equations: Equations
    clear_N: Tensor
    ids_J: Tensor
    place_J: Tensor
    prior_J: Tensor
    number_J: Tensor
    plausible_L: Tensor
    end_J: Tensor
    budget: list[int]
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def among(self, index_L: Tensor) -> Candidates:
        """Returns some candidates, with their keys and values."""
        ids_L, place_L = self.ids_J[index_L], self.place_J[index_L]
        return Candidates(ids_L, place_L, self.prior_J[index_L], *self.project(ids_L, place_L))

    def likely(self, number: int, chosen_L: Tensor) -> Tensor:
        """Returns chosen candidates and so many of the likeliest."""
        nearest = self.prior_J.topk(min(number, len(self.prior_J))).indices
        likely_J = torch.zeros_like(self.end_J)
        likely_J[nearest] = likely_J[chosen_L] = True
        return likely_J.nonzero()[:, 0]

    def next_word(self, tried: Mapping[int, Sequence[float]]) -> int | None:
        """Returns the number of the word to try next: a second try costs as much as four first.

        Args:
            tried: By the number of a word, the residuals that its tries left on this split.
        """
        turns = Counter(turn for residuals in tried.values() for turn in range(len(residuals)))
        numbers = range(len(self.clear_N))
        waiting = grouped(numbers, lambda number: len(tried.get(number, ())))
        waiting.pop(len(_LIKELIEST), None)
        if not waiting:
            return None
        turn = min(waiting, key=lambda turn: _DEARER**turn * (turns[turn] + 1))
        # The clearest are first tried, and those that came nearest are tried again.
        return min(waiting[turn], key=lambda n: min(tried.get(n, (-float(self.clear_N[n]),))))


class Rows(NamedTuple):
    """An update's gradients by words and places, which add up over the same (word, place) pairs.

    Attributes:
        words_M: Distinct words.
        tables: Rows of words and rows of places: of the embeddings' sum, then of query, key and
            value over the norm's sigma.
        budget: Directions of words and places, and how many there is room for.
    """

    words_M: Tensor
    tables: list[tuple[Tensor, Tensor]]
    budget: list[int]

    def placed(self) -> Tensor:
        """Returns P pinv(W) [T, M] of all tables side by side."""
        word_MX = torch.cat([by_word / by_word.norm() for by_word, _ in self.tables], 1)
        place_TX = torch.cat([by_place / by_word.norm() for by_word, by_place in self.tables], 1)
        spread_X = word_MX.std(0, correction=0).clamp_min(_EMPTY * word_MX.std())
        table_TM: Tensor = (place_TX / spread_X) @ torch.linalg.pinv(word_MX / spread_X)
        return table_TM


def rows_of(
    model: LanguageModel, gradients: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> Rows | str:
    """Returns gradients by words and places; or why they do not split.

    Args:
        model: At the broadcast weights.
        gradients: Of both embeddings and the first attention, by name.
        whole: The same before any text was subtracted.
    """
    family, directions = model.family, model.family.token_table(model.module).directions()
    assert family.position_embedding is not None
    word_VD, position_PD = gradients[family.word_embedding], gradients[family.position_embedding]
    words_M = _used(word_VD, whole[family.word_embedding]).nonzero()[:, 0]
    used_X = _used(position_PD, whole[family.position_embedding]).nonzero()[:, 0]
    if not len(words_M) or not len(used_X):
        return "no word is left"
    places, words = int(used_X[-1]) + 1, len(words_M)
    basis_XD = torch.cat(
        [directions.token_VD[words_M], directions.position_PD[:places], directions.constant_CD]
    ).double()
    budget = [*basis_XD.shape]
    if budget[0] + SPARE > budget[1]:
        return f"{words} words at {places} places are more than the hidden size, {budget[1]}, holds"
    inverse_DX = torch.linalg.pinv(basis_XD)
    tables = [(word_VD[words_M].double(), position_PD[:places].double())]
    for side, gradient_OD in family.projections(gradients, 0).items():
        rows_XO = (gradient_OD.double() @ inverse_DX).T
        rest_OD = gradient_OD - rows_XO.T @ basis_XD
        if not rest_OD.norm() < certificate.PRECISION * family.projections(whole, 0)[side].norm():
            return "the first layer's inputs are not words at places: dropout, noise, or more steps"
        tables.append((rows_XO[:words], rows_XO[words : words + places]))
    return Rows(words_M, tables, budget)


def _used(rows_XD: Tensor, whole_XD: Tensor) -> Tensor:
    """Returns which rows [X] belong to a text that is still in the update."""
    used_X: Tensor = rows_XD.norm(dim=1) > _EMPTY * whole_XD.norm(dim=1).max()
    return used_X


def split(
    model: LanguageModel, gradients: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> Split | str:
    """Returns gradients as equations of words; or why they do not split. Arguments: as `rows_of`.

    A search of many small steps does not suit a GPU: its tensors are on the CPU.
    """
    rows = rows_of(model, gradients, whole)
    if isinstance(rows, str):
        return rows
    family, tokenizer = model.family, model.tokenizer
    table, block = family.token_table(model.module), family.first_block(model.module)
    words_M, table_TM = rows.words_M.cpu(), rows.placed().cpu()
    order_TM = table_TM.topk(min(2, len(table_TM)), dim=0)
    special = torch.tensor(sorted(model.special_ids()))
    once_N = ((order_TM.values[0] > _ONCE) & ~torch.isin(words_M, special)).nonzero()[:, 0]
    if not len(once_N):
        return "no word of the batch occurs just once"
    place_N = order_TM.indices[0, once_N]

    def project(ids_L: Tensor, place_L: Tensor) -> tuple[Tensor, Tensor]:
        ids_L, place_L = ids_L.to(model.device), place_L.to(model.device)
        _, key_LHK, value_LHK = block.project(table(ids_L, place_L), place_L)
        return key_LHK.double().cpu(), value_LHK.double().cpu()

    begins_M, ends_M = words_M == tokenizer.cls_token_id, words_M == tokenizer.sep_token_id
    possible_TM = torch.cat([begins_M[None], (~begins_M).expand(table_TM[1:].shape)])
    likely_TM = table_TM > torch.where(order_TM.values[0] > _CLEAR, _ONCE, _PLAUSIBLE)
    likely_TM |= ends_M
    best_T = table_TM.masked_fill(~possible_TM | ends_M, -math.inf).argmax(1)
    likely_TM[range(len(best_T)), best_T] = True
    number_TM = torch.full_like(possible_TM, -1, dtype=torch.long)
    number_TM[place_N, once_N] = torch.arange(len(once_N))
    place_J, index_J = possible_TM.nonzero().T
    return Split(
        words_M=words_M,
        equations=_equations(model, rows, once_N.to(model.device), place_N.to(model.device)),
        clear_N=(order_TM.values[0] - order_TM.values[-1])[once_N],
        ids_J=words_M[index_J],
        place_J=place_J,
        prior_J=table_TM[place_J, index_J].clamp(_PLAUSIBLE / 10, 1.0),
        number_J=number_TM[place_J, index_J],
        plausible_L=likely_TM[place_J, index_J].nonzero()[:, 0],
        end_J=ends_M[index_J],
        budget=rows.budget,
        project=project,
    )


def _equations(model: LanguageModel, rows: Rows, once_N: Tensor, place_N: Tensor) -> Equations:
    """Returns the equations of words that occur once.

    Args:
        model: At the broadcast weights.
        rows: Gradients by words and places.
        once_N: These words, as indices of rows.
        place_N: Where they stand.
    """
    family = model.family
    table, block = family.token_table(model.module), family.first_block(model.module)
    assert block.behind is not None
    ids_N, (of_sum, *of_parts) = rows.words_M[once_N], rows.tables
    sigma_N1 = table.scale(ids_N, place_N).double()[:, None]
    gradients = [by_word[once_N] * sigma_N1 for by_word, _ in of_parts]
    # The part of an input's gradient that comes through its query, key and value.
    through_ND: Tensor
    with torch.enable_grad():
        x_ND = table(ids_N, place_N).detach().requires_grad_()
        projected = block.project(x_ND, place_N)
        (through_ND,) = torch.autograd.grad(
            [part_NHK.flatten(1) for part_NHK in projected],
            x_ND,
            [gradient_NO.to(x_ND) for gradient_NO in gradients],
        )
    do_NFO = block.behind(ids_N, place_N, of_sum[0][once_N], through_ND.double())
    size = (do_NFO.shape[-1] // block.num_heads) ** 0.5
    return Equations(
        ids_N=ids_N.cpu(),
        query_NHK=projected[0].detach().double().cpu() / size,
        dq_NHK=heads(gradients[0], block.num_heads).cpu() * size,
        do_NFHK=heads(do_NFO, block.num_heads).cpu(),
    )


def read_text(parts: Split, number: int, clock: Clock, tries: int) -> Text:
    """Returns the text of a word that occurs once, as far as the equations of its words give it.

    Args:
        parts: The split update.
        number: Of the word.
        clock: When time is up, exchanges end.
        tries: How often the word was tried: the more tries, the more candidates.
    """
    equations = parts.equations
    own = int((parts.number_J == number).nonzero()[0])
    first_L = parts.likely(_LIKELIEST[tries], parts.plausible_L)
    likeliest = parts.among(first_L)
    weight_L = relaxed(equations.of(number, likeliest), likeliest, int((first_L == own).nonzero()))
    sure_X = parts.number_J[first_L[weight_L > _ONCE]]
    numbers = [number, *(n for n in sure_X.tolist() if n not in (-1, number))]
    # Where nothing is left, the likeliest word stands in for what an end further on may need.
    inner_L = ~parts.end_J[first_L]
    rank_L = (weight_L + _PLAUSIBLE**2 * likeliest.prior_J)[inner_L]
    members_T = first_L[inner_L][best_of(rank_L, likeliest.place_J[inner_L])]
    open_J = ~parts.end_J & (parts.place_J != parts.place_J[own])
    text = Text((), math.inf, math.inf, ())
    for wide in range(1 + (tries > 0)):
        among_L = parts.likely(_EXCHANGED, first_L) if wide else first_L
        among, where_J = parts.among(among_L), torch.zeros_like(parts.ids_J)
        where_J[among_L] = torch.arange(len(among_L))
        equation_of = cache(partial(equations.of, candidates=among))
        for _ in range(_ROUNDS):
            if text.ids and clock.up():
                break
            tellers = [equation_of(n) for n in numbers[:_TELLING]]
            inside_T = _ended(parts, tellers, where_J, members_T, own)
            inside_T = mended(tellers, among, inside_T, open_J[among_L])
            kept = len(inside_T) - 1  # all but the end
            members_T = torch.cat([among_L[inside_T[:kept]], members_T[kept:]])
            once = [n for n in parts.number_J[among_L[inside_T]].tolist() if n >= 0]
            residuals = {n: equation_of(n).covariance(inside_T).residual for n in once}
            new = Text(
                ids=tuple(among.ids_J[inside_T].tolist()),
                excess=median(residuals.values()),
                rejected=math.inf,
                once=tuple(n for n in once if residuals[n] < SOLVED),
            )
            text = min(text, new, key=by_excess)
            nearest = sorted(once, key=residuals.__getitem__)
            if text.solved or {*nearest[:_TELLING]} == {*numbers[:_TELLING]}:
                break
            numbers = nearest
        if text.solved:
            break
    return text


def _ended(
    parts: Split, telling: Sequence[Equation], where_J: Tensor, members_T: Tensor, own: int
) -> Tensor:
    """Returns the members of a text up to the end that explains most, among candidates.

    Args:
        parts: The split update.
        telling: Equations of words of the text.
        where_J: The index of a candidate among those of the equations.
        members_T: The best candidate of each place.
        own: The word whose text it is.
    """
    place_J = parts.place_J
    ends_X = (parts.end_J & (place_J > place_J[own])).nonzero()[:, 0]
    texts = [where_J[torch.cat([members_T[: int(place_J[end])], end[None]])] for end in ends_X]
    return min(texts, key=partial(loss, telling))


def explained(
    text: Text,
    parts: Split,
    model: LanguageModel,
    left: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
) -> certificate.Proof | None:
    """Returns a text's part of the update, if its own gradient explains the rows of its words.

    Args:
        text: A text whose words' equations hold.
        parts: The split update.
        model: At the broadcast weights.
        left: The update without the texts that were proved.
        whole: The update.
    """
    (unit,) = certificate.units(model, [text.ids], [*left])
    name = model.family.word_embedding
    words = parts.equations.ids_N[list(text.once)].to(model.device)
    rows_XC = torch.stack([gradient[name][words].flatten() for gradient in unit.gradients], 1)
    rows_XC, target_X = rows_XC.double(), left[name][words].flatten().double()
    room = certificate.PRECISION * whole[name][words].norm()
    return certificate.proof_of(unit, rows_XC, target_X, room)
