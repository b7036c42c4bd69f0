"""Step peeling: the texts of a client's local steps, read one step after the other.

A client that makes several steps of SGD sends the sum of their gradients, each at the weights of
its own step. The first step was made at the weights that the server sent. So the states of its
texts, as these weights give them, lie in the row spaces of the sum, where DAGER (Petrov et al.
2024) looks for them. States of later texts are off by as much as the weights had moved by then. So
DAGER's search finds the texts of the first step, and no others. Whoever has these texts makes the
step again, which gives the weights of the second step and, by subtraction, the sum of the gradients
from there on. Its row spaces have fewer dimensions, and the search goes on.

Momentum and weight decay of steps that were read move weights in later steps, too. So what is sent
is compared with where the client would have come without any later gradient.

Once all steps are read, making them again proves the answer (`replay`). A text that is read wrongly
makes a wrong step, behind which no states lie in the row spaces: the search ends with what it has.

Limits: next-token training by SGD in float32, at a known rate, without dropout; a round must have
fewer tokens than hidden dimensions, each pass counted; learning that moves weights by no more than
rounding does not tell steps apart.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, islice
from operator import eq
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, Show, certificate, replay
from fedleak.attacks.certificate import NOTHING_PROVED
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.listening import listening
from fedleak.attacks.subspace.answer import (
    Judged,
    OnJudged,
    Reader,
    Reading,
    SpanSearch,
    by_excess,
    distinct,
    lacks_two_layers,
    recovered,
    telling,
)
from fedleak.attacks.subspace.decoder_search import extend_prefixes, first_inputs, without_runs
from fedleak.attacks.subspace.span import ACCEPT, REPEATS, layer_spans
from fedleak.attacks.subspace.update_evidence import output_rows
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.family import with_adapters
from fedleak.training.observation import Observation, UpdateKind
from fedleak.training.recipe import Recipe, copied_parameters
from fedleak.training.steps import Batch, gradient, steps_
from fedleak.util.finite import all_finite

_LEVELS = ((512, 1.0), (512, ACCEPT), (None, ACCEPT))
"""Nearest tokens that are tried, None: all, and the largest excess of a state: by first-order
theory, and then, if no step is found, with room."""

_FOUND, _CHOICES = 8, 8
"""Texts that are compared with the update, for each text of a step; choices among them."""

_GONE = 1e-3
"""Share of what only their states explain that texts of a step leave, at most: rounding."""

_ALIKE = 0.9
"""Cosine of the embeddings of words whose states are hardly told apart, at least."""

_FOLLOWS = 0.1
"""How far the output layer's row of a word that follows a state points along it, at least, of the
row that does so most."""

_ROUNDING = 1e-7
"""Of a float32 update, by its norm."""


@dataclass(frozen=True, kw_only=True)
class StepPeeling(Reader):
    """Texts of several local steps of SGD on a decoder, each step read at its own weights.

    Attributes:
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "step_peeling"
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"batch_size"})
    seconds: Seconds | None = 120.0

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs weights after several steps of next-token training, and what DAGER needs."""
        if setting.update != UpdateKind.DELTA:
            return "reads several local steps, and clients send a gradient: use kind = 'dager'"
        if setting.task != CAUSAL_LM:
            return (
                f"reads next-token training, and the task is {setting.task!r}: use kind = 'keyspan'"
            )
        return lacks_two_layers(setting)

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the texts in the order of their steps, as far as steps could be read."""
        known, clock = seen.knowledge, Clock(self.seconds)
        recipe, steps = known.recipe or Recipe(), known.local_steps or 1
        reason = replay.obstacle(seen)
        if reason is None and steps == 1:
            reason = "the client made one step, of which dager reads as much"
        if reason is None and not recipe.adds_up:
            reason = "the client did not step along gradients as they are"
        if reason is None and not any(replay.passes_and_sizes(seen, seen.update.num_examples)):
            reason = "how many texts are in a step cannot be told: grant batch_size"
        if reason is not None:
            return Reading.none(f"nothing read: {reason}")
        peeling = _Peeling(seen, model, rng, clock, telling(on_progress, model), recipe, steps)
        with copied_parameters(model.module.parameters()):
            steps_(model, peeling.gradients(), recipe, known.learning_rate or 1.0)
        count = seen.update.num_examples
        texts, certain = peeling.texts[:count], min(peeling.stepped, count)
        # What is read of a later step rests on the earlier ones.
        worst = accumulate((text.excess for text in texts), max)
        texts = [replace(text, excess=value) for text, value in zip(texts, worst, strict=True)]
        counts = {"steps": [peeling.done, steps]}
        if not texts:
            reason = "nothing read: the texts of the first step do not stand out of the others"
            return Reading.none(reason, **counts, **clock.late())
        answer = recovered(
            [replace(text, ids=certificate.close(model, text.ids)) for text in texts],
            NOTHING_PROVED,
            diagnostics=counts
            | {"likely": [i < certain for i in range(len(texts))]}
            | clock.late(),
            reason=f"nothing proved: {peeling.done} of {steps} steps were read",
        )
        sequences = tuple(text.ids for text in texts)
        return Reading(answer, sequences, stepped=sequences[:certain])


@dataclass
class _Peeling:
    """The steps of one update.

    Attributes:
        seen: The update.
        model: At the weights of the step that is read.
        texts: What was read, in the order of steps.
        done: Steps that were read whole.
        stepped: Texts of these steps.
    """

    seen: Observation
    model: LanguageModel
    rng: torch.Generator
    clock: Clock
    tell: OnJudged
    recipe: Recipe
    steps: int
    texts: list[Judged] = field(default_factory=list)
    done: int = 0
    stepped: int = 0

    def gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yields the gradient of each step that can be read, at the weights that the last left."""
        sizes, broadcast = self._sizes(), self._weights()
        before = broadcast
        while self.done < self.steps and not self.clock.up():
            now = self._weights()
            rest = self._rest(broadcast, before, now)
            if not all(map(all_finite, rest.update.tensors.values())):  # steps diverge
                return
            texts, step = self._read(rest, {size[0] for size in sizes})
            self.texts += texts
            if step is None:
                return
            sizes = [size[1:] for size in sizes if size[0] == len(texts)]
            self.done, self.stepped, before = self.done + 1, len(self.texts), now
            yield step

    def _weights(self) -> dict[str, Tensor]:
        """Returns a copy of the weights that clients send."""
        weights = self.model.parameters()
        return {name: weights[name].clone() for name in self.seen.update.tensors}

    def _sizes(self) -> list[tuple[int, ...]]:
        """Returns how many texts each step may have: all that the number of steps admits."""
        count = self.seen.update.num_examples
        return [
            tuple(min(size, count - start) for start in range(0, count, size)) * passes
            for passes, size in replay.passes_and_sizes(self.seen, count)
        ]

    def _rest(
        self,
        broadcast: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        now: Mapping[str, Tensor],
    ) -> Observation:
        """Returns the update that the steps from here on make.

        Args:
            broadcast: The weights that the server sent.
            before: Those of the last step.
            now: Those that it left.
        """
        recipe, rate = self.recipe, self.seen.knowledge.learning_rate or 1.0
        rates = recipe.rates or (rate,) * self.steps
        left, last = rates[self.done :], rates[self.done - 1]
        # What one unit of velocity moves in all steps to come.
        glide = sum(rate * recipe.momentum**n for n, rate in enumerate(left, 1))
        tensors = dict[str, Tensor]()
        for name, sent in self.seen.update.tensors.items():
            end, coasting = broadcast[name], now[name]
            if recipe.momentum:
                coasting = coasting - glide / last * (before[name] - coasting)
            elif recipe.weight_decay:
                end = end * math.prod(1 - rate * recipe.weight_decay for rate in rates)
                coasting = coasting * math.prod(1 - rate * recipe.weight_decay for rate in left)
            tensors[name] = end + sent - coasting
        return replace(self.seen, update=replace(self.seen.update, tensors=tensors))

    def _read(
        self, rest: Observation, sizes: Collection[int]
    ) -> tuple[list[Judged], dict[str, Tensor] | None]:
        """Returns the texts of the first step of what is left, and their gradient.

        The gradient is None if no texts that were found make a step.
        """
        gradients, kinds = certificate.as_gradient(rest), list[Judged]()
        spans = layer_spans(self.model, gradients)
        if spans is None:
            return kinds, None
        rows_OD = self._rows(gradients).double()
        for most, accept in _LEVELS:
            slots = first_inputs(self.model, spans.first, self.rng, self.clock, most)
            slots = slots[: spans.second.rank + REPEATS]
            block = self.model.family.first_block(self.model.module)
            search = SpanSearch(slots, block, spans, 0, self.rng, self.clock, self.tell, accept)
            sentences = without_runs(extend_prefixes(search), self.model)
            nearest = sorted(sentences, key=by_excess)
            kinds = distinct(nearest, ())[: _FOUND * max(sizes)]
            texts = [self._seen_in(text, gradients) for text in self.clock.paced(kinds)]
            if len(texts) > min(sizes):
                texts.sort(key=lambda text: left_by([text], rows_OD))
            for size in sorted(sizes, reverse=True):
                for batch in self.clock.paced(islice(combinations(texts, size), _CHOICES)):
                    if left_by(batch, rows_OD) < _GONE:
                        step = [self._spelled(text.judged, nearest, gradients) for text in batch]
                        return step, self._gradient(step)
            if self.clock.up():
                break
        return kinds[: max(sizes)], None

    def _gradient(self, texts: Sequence[Judged]) -> dict[str, Tensor]:
        """Returns the gradient of a step on texts."""
        closed = [certificate.close(self.model, text.ids) for text in texts]
        with torch.enable_grad():
            return gradient(self.model, Batch(closed, [0] * len(closed)), self.recipe)

    def _spelled(
        self, text: Judged, nearest: Sequence[Judged], rest: Mapping[str, Tensor]
    ) -> Judged:
        """Returns a text with words that the output layer names, where states leave them open.

        Words that a model has hardly met have nearly equal embeddings, and so nearly equal states:
        then several are found at a place. But each word has a row of its own in the output layer,
        which moves along the states that the word follows. A word that follows none is replaced.
        """
        outer: Any = self.model.module
        rows_VD = output_rows(self.model, rest)
        others = [other.ids for other in nearest if len(other.ids) == len(text.ids)]
        others = [ids for ids in others if 2 * sum(map(eq, ids, text.ids)) > len(ids)]
        if rows_VD is None or len(others) == 1:
            return text
        ids_1T = torch.tensor([text.ids], device=self.model.device)
        (hidden_TD,) = outer.base_model(input_ids=ids_1T).last_hidden_state
        word_VD = F.normalize(self.model.family.token_table(outer).token_VD)
        spelled = [*text.ids]
        for place in range(1, len(spelled)):
            if len({ids[place] for ids in others}) > 1:
                nearly_V = word_VD @ word_VD[spelled[place]] > _ALIKE
                follows_V = (-rows_VD @ hidden_TD[place - 1]).masked_fill(~nearly_V, -torch.inf)
                if follows_V[spelled[place]] < _FOLLOWS * follows_V.max():
                    spelled[place] = int(follows_V.argmax())
        return replace(text, ids=tuple(spelled))

    def _rows(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient [O, D] at all matrices of the second attention."""
        return torch.cat(self.model.family.attention_gradients(gradients, 1))

    def _seen_in(self, text: Judged, names: Collection[str]) -> "_Text":
        """Returns a text with its states and gradient in the second attention."""
        every = with_adapters(self.model.family.attention_parameters(1))
        inputs = sorted(name for name in every if name in names)
        module = self.model.module.get_submodule(inputs[0].removesuffix(".weight"))
        with listening([module]) as heard:
            self.model.module(input_ids=torch.tensor([text.ids], device=self.model.device))
        (unit,) = certificate.units(self.model, [text.ids], inputs)
        return _Text(text, heard[module][0][0], self._rows(unit.gradients[0]))


class _Text(NamedTuple):
    """A text that was found.

    Attributes:
        judged: What was found.
        states_TD: Inputs of the second attention.
        rows_OD: Its gradient, of a sum over targets, at the matrices that multiply these.
    """

    judged: Judged
    states_TD: Tensor
    rows_OD: Tensor


def left_by(texts: Sequence[_Text], rows_OD: Tensor) -> float:
    """Returns the share that texts leave of the rows that only their states explain.

    It is the median of a text's states, and the largest of the texts. With the right multiple w of
    the texts' gradient taken out, nothing is left, and with w' the share (1 - w' / w)^2. So one
    share tells w, up to a sign.

    Args:
        texts: One or more.
        rows_OD: The update, as a gradient, at the matrices of the second attention.
    """
    own_OD = torch.stack([text.rows_OD for text in texts]).sum(0).double()
    states_ND = torch.cat([text.states_TD for text in texts])
    noise = _ROUNDING * float(rows_OD.norm())
    before_N = alone(rows_OD, states_ND, noise)

    def left(weight: float) -> Tensor:
        return alone(rows_OD - weight * own_OD, states_ND, noise) / before_N

    # The mean over targets, if these were all.
    mean = 1 / len(states_ND)
    root = math.sqrt(float(left(mean).median()))
    weights = [mean / (1 + sign * root) for sign in (1, -1) if 1 + sign * root > 0]
    lengths = [len(text.states_TD) for text in texts]
    return min(
        max(float(part.median()) for part in torch.split(left(weight), lengths))
        for weight in weights
    )


def alone(rows_OD: Tensor, states_ND: Tensor, noise: float) -> Tensor:
    """Returns how much of the square of rows each state alone explains [N].

    It is the least square of the rows along a direction that has the state in it (Capon 1969), and
    infinite where far larger rows, which were taken out of them, leave only rounding.
    """
    square_DD = rows_OD.T @ rows_OD
    square_DD.diagonal().add_(noise**2)
    states_DN = F.normalize(states_ND.double(), dim=1).T
    root_DD, singular = torch.linalg.cholesky_ex(square_DD)
    if singular:
        return states_DN.new_full((states_DN.shape[1],), math.inf)
    along_DN = torch.cholesky_solve(states_DN, root_DD)
    return 1 / (states_DN * along_DN).sum(0)
