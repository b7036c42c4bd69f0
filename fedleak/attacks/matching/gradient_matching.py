"""From observations to answers of gradient matching, many victims in one batch.

Shapes: R rows, B sequences, T tokens, M tokens of a bag, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, Progress, Report
from fedleak.attacks.certificate import Member, as_gradient, difference, is_linear, precision
from fedleak.attacks.matching import bucketing
from fedleak.attacks.matching.batch_structure import Shape, Shapes, bag, frame, shapes
from fedleak.attacks.matching.bucketing import Size
from fedleak.attacks.matching.factored_gradients import BatchGradients, tables
from fedleak.attacks.matching.gradient_distance import of_nothing, target_of
from fedleak.attacks.matching.guesses import (
    FreeEmbeddings,
    Mixtures,
    Objective,
    Space,
    lower_precision,
    mean_norm,
    rows_of,
)
from fedleak.attacks.matching.optimizer import Found, Loss, Recipe, Watch, distance_of
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models import prior as priors
from fedleak.models.prior import Prior
from fedleak.observation import Observation
from fedleak.reconstruction import Reconstruction, Status

Count = Annotated[int, Field(ge=1)]

Algorithm = Callable[
    [Objective, Recipe, Prior | None, Sequence[torch.Generator], Watch], list[Found]
]

TABLES = 1 / 3
"""What each table counts, as a share of all other tensors: they say where tokens are."""

_NOTHING = 1e-15
"""A tensor of no larger norm, or inverse of it, is left out: float32 cannot square it."""

_CHANCE = 0.5
"""Lengths that were only tried are believed if the gradient comes so much nearer than at random."""


@dataclass(frozen=True)
class Method:
    """How an attack matches gradients.

    Attributes:
        algorithm: What finds the tokens.
        recipe: Its constants where the tokens of the batch are known.
        free_recipe: And where they are not.
        loss: What gradients are measured by.
        scaled: Free embeddings start with the length of the model's own; else as they are drawn.
        prior: A language model of text, by name.
    """

    algorithm: Algorithm
    recipe: Recipe
    free_recipe: Recipe
    loss: Loss
    scaled: bool
    prior: str | None = None


@dataclass(frozen=True)
class GradientMatching(ABC):
    """What all attacks that match gradients have.

    Attributes:
        preset: "best", or "faithful" to the authors' code.
        size: "large" takes the authors' constants for BERT-large; for "faithful".
        steps: Of Adam; None: as the preset has it.
        precision: "mixed" ranks guesses and optimises most of the way in bfloat16: for GPUs and
            CPUs with units for it, on others it is slower.
        starts: Random starts that are optimised side by side; "faithful" has one.
        shapes: Lengths and labels that are tried at most, where they are not known.
        seconds: After which the best so far counts, for one update; None: no limit.
        at_once: Updates in a batch.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"labels", "lengths"})
    slow: ClassVar[bool] = True
    preset: Literal["best", "faithful"] = "best"
    size: Literal["base", "large"] = "base"
    steps: Count | None = None
    precision: Literal["float32", "mixed"] = "float32"
    starts: Count = 2
    shapes: Count = 16
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    at_once: Count = 8

    @property
    def faithful(self) -> bool:
        """Whether it is the authors' attack."""
        return self.preset == "faithful"

    @property
    def starts_of_each(self) -> int:
        """Random starts that are optimised of each shape."""
        return 1 if self.faithful else self.starts

    @abstractmethod
    def method(self) -> Method:
        """Returns how this attack matches gradients."""

    def check_equipment(self) -> None:
        """Refuses a prior that cannot be loaded."""
        prior = self.method().prior
        if prior is not None:
            priors.check(prior)

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a parameter beside the word embedding."""
        if not setting.shared - {setting.family.word_embedding}:
            return "needs a parameter beside the word embedding: add one to update.share"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts whose gradient is nearest to the observed one."""
        (answer,) = self.many([seen], model, rngs=[rng], report=lambda which, how: None)
        return answer

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: Report,
    ) -> list[Reconstruction]:
        """Returns those texts for each observation."""
        answers: dict[int, Reconstruction] = {}
        victims: dict[int, Victim] = {}
        steps = self.method().recipe.steps
        for i, (one, rng) in enumerate(zip(seen, rngs, strict=True)):
            report(i, Progress(0, steps, math.nan, "", "what the update tells"))
            victim = _victim(one, model, self, rng)
            if victim.observed:
                victims[i] = victim
            else:
                reason = "every tensor of the update is zero: nothing to match"
                answers[i] = Reconstruction.none(Status.ABSTAINED, reason)
        for group in _alike(victims, self.starts_of_each, model.device):
            chosen = {i: victims[i] for i in group}
            answers |= _together(chosen, model, self, [rngs[i] for i in group], report)
        return [answers[i] for i in range(len(seen))]


@dataclass(frozen=True)
class Victim:
    """One observation, and what is known of its batch before the search.

    Attributes:
        seen: The observation.
        observed: Its mean gradient, by parameter name, without the word embedding.
        shapes: What the batch may look like.
        bag_V: Its tokens; None if they cannot be told.
        rows_VD: The word embedding's gradient there; None if it was not shared.
        left_out: Shared tensors that say nothing.
    """

    seen: Observation
    observed: Mapping[str, Tensor]
    shapes: Shapes
    bag_V: Tensor | None
    rows_VD: Tensor | None
    left_out: int


def _victim(
    seen: Observation, model: LanguageModel, attack: GradientMatching, rng: torch.Generator
) -> Victim:
    family = model.family
    steps = seen.knowledge.local_steps or 1
    # Several local steps send the sum of their gradients.
    gradients = {name: tensor / steps for name, tensor in as_gradient(seen).items()}
    null = frozenset() if attack.faithful else family.null_parameters(gradients)
    observed = {
        name: tensor
        for name, tensor in gradients.items()
        if name != family.word_embedding
        and name not in null
        and _NOTHING < tensor.norm() < 1 / _NOTHING
    }
    shapes_ = shapes(seen, model, rng, attack.shapes)
    bag_V = None if attack.faithful else _content(bag(seen, model, rng), model)
    words = gradients.get(family.word_embedding)
    # The rows of a tied embedding are those of the output layer, too.
    tied = model.tied
    rows_VD = words[bag_V] if words is not None and bag_V is not None and not tied else None
    left_out = len(gradients) - len(observed) - (family.word_embedding in gradients)
    return Victim(seen, observed, shapes_, bag_V, rows_VD, left_out)


def _content(bag_V: Tensor | None, model: LanguageModel) -> Tensor | None:
    """Returns the tokens of a bag that are not special, None if there are none."""
    if bag_V is None:
        return None
    special = torch.tensor(sorted(model.special_ids()), device=bag_V.device)
    content_V = bag_V[~torch.isin(bag_V, special)]
    return content_V if len(content_V) else None


def _alike(victims: Mapping[int, Victim], starts: int, device: torch.device) -> list[list[int]]:
    """Returns the victims in groups of the same parameters, kind of space and about one length."""
    groups: dict[object, list[int]] = {}
    for i, one in victims.items():
        kind = (tuple(one.observed), one.bag_V is None, one.rows_VD is None)
        groups.setdefault(kind, []).append(i)
    sizes = {i: _size(one, starts) for i, one in victims.items()}
    a_pass = bucketing.PASS.get(device.type, bucketing.PASS["cpu"])
    return [part for group in groups.values() for part in bucketing.parts(group, sizes, a_pass)]


def _size(victim: Victim, starts: int) -> Size:
    each = victim.shapes.each
    longest = max(max(shape.lengths) for shape in each)
    return Size(longest, max(len(shape.lengths) for shape in each), starts * len(each))


def _together(
    victims: Mapping[int, Victim],
    model: LanguageModel,
    attack: GradientMatching,
    rngs: Sequence[torch.Generator],
    report: Report,
) -> dict[int, Reconstruction]:
    """Returns the answers for victims that are alike, by their number."""
    each = list(victims.values())
    method = attack.method()
    recipe = method.free_recipe if each[0].bag_V is None else method.recipe
    latest = dict.fromkeys(victims, Progress(0, recipe.steps, math.nan, ""))

    def look(step: int, phase: str, found: Sequence[Found]) -> None:
        for number, one in zip(latest, found, strict=False):
            texts = objective.rows.sequences(one.row, one.ids_BT)
            text = " / ".join(model.decode(ids) for ids in texts)
            latest[number] = latest[number]._replace(loss=one.loss, text=text)
        for number, so_far in latest.items():
            report(number, so_far._replace(step=step, phase=phase))

    watch = Watch(None if attack.seconds is None else attack.seconds * len(each), look)
    of_row = [
        (v, shape)
        for v, one in enumerate(each)
        for shape in one.shapes.each
        for _ in range(1 if attack.faithful else attack.starts)
    ]
    # A random stream for each row, so that it does not matter who else is in the batch.
    rng_R = [
        torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rngs[v])))
        for v, _ in of_row
    ]
    victim_R = torch.tensor([v for v, _ in of_row], device=model.device)
    objective = _objective(each, model, attack, of_row, victim_R)
    prior = None if method.prior is None else priors.load(method.prior, model)
    if prior is not None and attack.precision == "mixed":
        prior = prior.to(torch.bfloat16)
    with ExitStack() as listening:
        for one in (objective, objective.rough):
            if one is not None:
                listening.enter_context(one.batch_gradients.ready())
        found = method.algorithm(objective, recipe, prior, rng_R, watch)
        apart_V = _apart(objective, found)
        chance_V = _apart(objective, _by_chance(objective, len(each)))
    return {
        number: _answer(one, model, of_row[best.row][1], sequences, float(apart), float(chance))
        for number, one, best, sequences, apart, chance in zip(
            victims,
            each,
            found,
            (objective.rows.sequences(best.row, best.ids_BT) for best in found),
            apart_V,
            chance_V,
            strict=True,
        )
    }


def _objective(
    victims: Sequence[Victim],
    model: LanguageModel,
    attack: GradientMatching,
    of_row: Sequence[tuple[int, Shape]],
    victim_R: Tensor,
) -> Objective:
    """Returns what the rows are about: for each its victim and shape."""
    family = model.family
    rows = rows_of([shape for _, shape in of_row], frame(model), model)
    table_VD = model.module.get_parameter(family.word_embedding).detach()
    observed = [dict(one.observed) for one in victims]
    space: Space
    if victims[0].bag_V is None:
        # LAMP's starts have the length of word embeddings; DLG's and TAG's are as they are drawn.
        norm = float(mean_norm(table_VD)) if attack.method().scaled else None
        space = FreeEmbeddings(model, table_VD, _allowed(model, attack.faithful), norm)
    else:
        ids_VM, there_VM = _padded([one.bag_V for one in victims if one.bag_V is not None])
        hint_VTM = table_VD.new_zeros(len(victims), rows.length, ids_VM.shape[1])
        for v, one in enumerate(victims):
            if one.rows_VD is not None:
                rows_MD = one.rows_VD.new_zeros(ids_VM.shape[1], one.rows_VD.shape[1])
                rows_MD[: len(one.rows_VD)] = one.rows_VD
                observed[v][family.word_embedding] = rows_MD
                hint_VTM[v] = _hint(one, model, hint_VTM.shape[1], rows_MD)
        space = Mixtures(model, table_VD, ids_VM[victim_R], there_VM[victim_R], hint_VTM[victim_R])
    small = [*tables(model), family.word_embedding]
    tokens = rows.mask_RBT.shape[1] * rows.length
    whole = list(observed[0]) if attack.method().loss == "l2l1" else small
    target = target_of(observed, tokens, whole)
    # The tables say where tokens are; among a hundred tensors that would hardly count.
    weights = {} if attack.faithful else {name: TABLES * len(observed[0]) for name in small}
    distance = distance_of(attack.method().loss, weights)
    # LAMP's weights are for distances as they are; ours are shares of the observed gradient.
    unit_V = of_nothing(distance, target)
    unit_R = (torch.ones_like(unit_V) if attack.faithful else unit_V)[victim_R]
    gradients, target = BatchGradients(model, target.names), target.rows(victim_R)
    exact = Objective(model, gradients, distance, target, rows, space, victim_R, unit_R)
    if attack.precision != "mixed":
        return exact
    low = lower_precision(model)
    rough = replace(
        exact,
        model=low,
        batch_gradients=BatchGradients(low, target.names),
        target=target.to(torch.bfloat16),
    )
    return replace(exact, rough=rough)


def _hint(victim: Victim, model: LanguageModel, length: int, rows_MD: Tensor) -> Tensor:
    """Returns each token's share [T, M] of each position's gradient; 0 if that was not sent.

    The gradient of a position is the sum of those at its places, and that of a token which occurs
    once is the one at its place: least squares tells where it is.
    """
    position_PD = victim.observed.get(model.family.position_embedding or "")
    share_TM = rows_MD.new_zeros(length, len(rows_MD))
    if position_PD is not None:
        tokens = len(victim.bag_V) if victim.bag_V is not None else 0
        wanted_TD = position_PD[:length]
        share_MT = torch.linalg.pinv(rows_MD[:tokens].double().T) @ wanted_TD.double().T
        share_TM[:, :tokens] = share_MT.T.clamp(0, 1).to(share_TM)
    return share_TM


def _padded(bags_V: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the bags as ids [V, M], and where they have any."""
    ids_VM = torch.nn.utils.rnn.pad_sequence(list(bags_V), batch_first=True)
    lengths_V1 = torch.tensor([[len(bag)] for bag in bags_V], device=ids_VM.device)
    return ids_VM, torch.arange(ids_VM.shape[1], device=ids_VM.device) < lengths_V1


def _allowed(model: LanguageModel, faithful: bool) -> Tensor:
    """Returns the tokens that may stand for an embedding.

    The authors leave out unused ones, but no special ones.
    """
    tokens = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    special = frozenset() if faithful else model.special_ids()
    allowed = [i for i, t in enumerate(tokens) if i not in special and "[unused" not in str(t)]
    return torch.tensor(allowed, device=model.device)


def _apart(objective: Objective, found: Sequence[Found]) -> Tensor:
    """Returns the distance [V] of each victim's tokens."""
    rows_V = torch.tensor([one.row for one in found], device=objective.victim_R.device)
    of_each = objective.take(rows_V)
    ids_VBT = torch.stack([one.ids_BT for one in found])
    apart_V = of_each.scores(of_each.space.exact(of_each.rows, ids_VBT[:, None]))[:, 0]
    return apart_V.clamp_min(0)  # of equal gradients rounding may leave less


def _by_chance(objective: Objective, victims: int) -> list[Found]:
    """Returns random tokens for each victim."""
    rows = [int((objective.victim_R == v).nonzero()[0]) for v in range(victims)]
    of_each = objective.take(torch.tensor(rows, device=objective.victim_R.device))
    rng = [torch.Generator().manual_seed(0) for _ in rows]
    # Not a start: that may follow what the update says of places.
    ids_VBT = of_each.read(of_each.space.random(of_each.rows, rng))
    return [Found(row, ids_BT, 0.0) for row, ids_BT in zip(rows, ids_VBT, strict=True)]


def _answer(
    victim: Victim,
    model: LanguageModel,
    shape: Shape,
    sequences: Sequence[tuple[int, ...]],
    apart: float,
    chance: float,
) -> Reconstruction:
    if not victim.shapes.told and not apart < _CHANCE * chance:
        reason = "lengths are not known, and none of those tried comes near the update"
        return Reconstruction.none(Status.ABSTAINED, reason, distance=apart)
    seen = victim.seen
    return Reconstruction(
        Status.RECOVERED,
        sequences=tuple(sequences),
        evidence=(apart,) * len(sequences),
        tokens=tuple(sorted({token for one in sequences for token in one})),
        diagnostics={
            "distance": apart,
            "distance_by_chance": chance,
            "left_out": victim.left_out,
            "candidates": {"shapes": len(victim.shapes.each)}
            | ({} if victim.bag_V is None else {"tokens": len(victim.bag_V)}),
        },
        verified=is_linear(seen) and _proved(model, shape, sequences, seen),
    )


def _proved(
    model: LanguageModel, shape: Shape, sequences: Sequence[tuple[int, ...]], seen: Observation
) -> bool:
    """Whether the gradient of these sequences is the observed one."""
    members = []
    for b, ids in enumerate(sequences):
        if model.task == CLASSIFICATION:
            counts = tuple(int(label == shape.labels[b]) for label in range(model.num_labels))
            members.append(Member(ids, 1 / len(sequences), counts))
        else:
            # `difference` puts the end back.
            members.append(Member(ids[: len(ids) - len(frame(model).last)], 0.0, None))
    observed = as_gradient(seen)
    # So few numbers that other texts could have them too, as precisely as they are told, are none.
    told = sum(int(tensor.count_nonzero()) for tensor in observed.values())
    tokens = sum(map(len, sequences))
    if told * -math.log2(precision(seen)) < tokens * math.log2(len(model.tokenizer)):
        return False
    return difference(model, members, [1] * len(members), observed) < precision(seen)
