"""What the tests of gradient matching share: looks into the objective that an attack builds."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from fedleak.attacks.matching import victims
from fedleak.attacks.matching.gradient_distance import Loss
from fedleak.attacks.matching.gradient_matching import GradientMatching, MatchingMethod
from fedleak.attacks.matching.optimizer import MatchingConfig, best_of_each, constant
from fedleak.attacks.matching.parametrization import FreeEmbeddings
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]


@pytest.fixture(params=KINDS, ids="-".join)
def model(request, small):
    return small(*request.param)


@pytest.fixture(params=["mixtures", "free"])
def space(request):
    return request.param


def _inside(check, seen, model, like):
    ran = []

    def algorithm(search):
        objective, config, rng, _ = search
        ran.append(check(objective, config, rng))
        zero_R = torch.zeros(len(rng))
        return best_of_each(objective.victim_R, objective.rows.ids_RBT, zero_R)

    @dataclass(frozen=True, kw_only=True)
    class Attack(GradientMatching):
        def method(self):
            return replace(like.method(), algorithm=algorithm)

    attack = Attack(**{field.name: getattr(like, field.name) for field in fields(GradientMatching)})
    rngs = [stream(0, "attack", i) for i in range(len(seen))]
    with pytest.MonkeyPatch.context() as patch:
        # Padding costs less than another pass, however much there is: all victims together.
        patch.setattr(victims, "PASS", {"cpu": 10**9})
        attack.many(seen, model, rngs=rngs, report=lambda *_: None)
    assert len(ran) == 1


@pytest.fixture
def inside():
    """Runs `check(objective, config, rng)` in place of the algorithm of the attack `like`."""
    return _inside


@dataclass(frozen=True, kw_only=True)
class OneStep(GradientMatching):
    """An attack by any distance."""

    loss: Loss

    def method(self):
        config = MatchingConfig(steps=1, step_size=0.1, schedule=constant)
        return MatchingMethod(lambda *_: [], config, config, self.loss)


@pytest.fixture
def on_objective():
    """Runs `check(objective)` on the objective of an attack by a distance, in a space."""

    def run(check, seen, model, *, space="mixtures", loss="cos", **options):
        # A key's bias has no gradient but noise, which the authors' loss counts like any other.
        null = {
            name
            for observation in seen
            for name in model.family.null_parameters(observation.update.tensors)
        }
        seen = [
            replace(
                observation,
                update=partial_update(
                    observation.update, sorted(observation.update.tensors.keys() - null)
                ),
            )
            for observation in seen
        ]
        preset = "faithful" if space == "free" else "best"
        like = OneStep(loss=loss, preset=preset, starts=1, **options)
        _inside(lambda objective, config, rng: check(objective), seen, model, like)

    return run


@pytest.fixture
def true_ids():
    """Returns the true tokens [R, B, T], padded as the rows are."""

    def ids_of(truth, objective):
        ids_RBT = objective.rows.ids_RBT.clone()
        for b, ids in enumerate(truth.sequences):
            ids_RBT[:, b, : len(ids)] = torch.tensor(ids)
        return ids_RBT

    return ids_of


@pytest.fixture
def random_variables():
    """Returns variables of unit variance, so that no mixture is sure of anything."""

    def drawn(objective, guesses=None):
        space = objective.space
        free = isinstance(space, FreeEmbeddings)
        features = len(space.table_VD[0]) if free else space.ids_RM.shape[1]
        shape = (*objective.rows.mask_RBT.shape, features)
        shape = shape if guesses is None else (shape[0], guesses, *shape[1:])
        return torch.randn(shape, generator=stream(3, "leaf"))

    return drawn


class LikesRising:
    """A prior that counts the pairs of tokens that fall."""

    def nll(self, ids_NT, mask_NT, stop=None):
        pairs = (ids_NT[:, None, :] < ids_NT[:, :, None]).triu(1)
        there = mask_NT.bool()[:, None, :] & mask_NT.bool()[:, :, None]
        return (pairs & there).sum((1, 2)).float()

    def to(self, dtype):
        return self


@pytest.fixture
def likes_rising():
    return LikesRising()
