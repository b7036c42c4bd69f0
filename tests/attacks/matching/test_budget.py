"""`seconds` of gradient matching: every phase keeps to it, and shows that it moves.

Time is counted, not measured: each pass over the model or the prior takes a second.
"""

from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
import torch
from cases import some

from fedleak.attacks import clock
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching import gradient_matching, objective, relaxed_tokens, victims
from fedleak.attacks.matching.dlg import Dlg, Tag
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.matching.gradient_matching import GradientMatching
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.matching.optimizer import Search, Watch, best_of_each
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, ModelSpec, loading
from fedleak.models import prior as priors
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

TEXTS = ("she told us that it is over", "nobody knows it")
GRANTED = ("labels", "lengths")
FEW = 8
"""Passes that may follow when time is up: a last look at each phase, and what the answer says."""


class Passes:
    """A clock that a pass moves by a second."""

    def __init__(self, monkeypatch):
        self.now = 0
        monkeypatch.setattr(clock, "now", lambda: self.now)
        # All rows and starts, however long they take.
        monkeypatch.setattr(gradient_matching, "seconds_of_step", lambda *_: 0.0)
        # A guess at a time, and a candidate of the prior at a time.
        monkeypatch.setattr(objective, "TOKENS_AT_ONCE", {"cpu": 1})
        monkeypatch.setattr(priors, "_LOGITS", {"cpu": 1})
        for owner, name in ((BatchGradients, "__call__"), (priors.Prior, "_total")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, whole):
        def counted(*args, **options):
            self.now += 1
            return whole(*args, **options)

        return counted


@pytest.fixture
def passes(monkeypatch):
    return Passes(monkeypatch)


@pytest.fixture
def seen(small, observe):
    """Two updates of one model that nothing matches exactly: one tells its tokens, one does not."""
    model = small("bert", width=16, layers=1)
    truth = observe(model, TEXTS, granted=GRANTED)
    rng = torch.Generator().manual_seed(0)
    noised = {
        name: value + 0.01 * torch.randn(value.shape, generator=rng)
        for name, value in truth.seen.update.tensors.items()
    }
    words = {n: v for n, v in truth.seen.update.tensors.items() if "word_embeddings" in n}

    def of(tensors):
        kept = replace(truth.seen.update, tensors=tensors)
        return replace(truth.seen, update=partial_update(kept, ["word_emb", "query", "LayerNorm"]))

    return model, {"known": of(noised | words), "unknown": of(noised)}


class Shown:
    """What was reported, and when."""

    def __init__(self, passes):
        self._passes, self.parts = passes, []

    def __call__(self, _, progress):
        self.parts.append((self._passes.now, progress))

    def at(self, now):
        """The phase that was under way then."""
        before = [progress.phase for when, progress in self.parts if when <= now and progress.phase]
        return before[-1].partition(" ")[0]

    def longest_silence(self):
        times = [0, *(when for when, _ in self.parts), self._passes.now]
        return max(after - before for before, after in pairwise(times))


def run(attack, seen, model, passes):
    shown = Shown(passes)
    rngs = [stream(0, "attack", i) for i in range(len(seen))]
    return attack.many(seen, model, rngs=rngs, report=shown), shown


STARTS = {"guesses": 60, "discrete": "never"}
DESCENT = {"guesses": 1, "steps": 500, "discrete": "never"}
CHANGES = {"guesses": 1, "steps": 20, "orders": 500}
AT_END = {"guesses": 1, "steps": 4, "orders": 500, "discrete": "at-end"}


@pytest.mark.parametrize(
    ("preset", "tokens", "prior"),
    some(product(["best", "faithful"], ["known", "unknown"], [None, "builtin/gpt2-tiny"]), every=3),
)
@pytest.mark.parametrize(
    ("setting", "seconds", "phase"),
    [
        (STARTS, 20, "starts"),
        (STARTS, 80, "orders"),
        (DESCENT, 20, "descent"),
        (CHANGES, 30, "changes"),
        (AT_END, 30, "changes"),
    ],
    ids=["starts", "orders of a start", "descent", "changes", "changes at the end"],
)
def test_every_phase_ends_within_a_few_passes_of_its_time_and_shows_that_it_moves(
    seen, passes, preset, tokens, prior, setting, seconds, phase
):
    model, updates = seen
    attack = Lamp(preset=preset, starts=1, seconds=seconds, prior=prior, **setting)
    (answer,), shown = run(attack, [updates[tokens]], model, passes)
    assert answer.status == Status.RECOVERED
    known = tokens == "known" and preset == "best"
    assert ("tokens" in answer.diagnostics["candidates"]) == known
    # The prior looks at all changes of a sentence before the gradient does.
    assert shown.at(seconds) == ("prior" if prior and phase == "changes" else phase)
    assert seconds < passes.now <= seconds + FEW
    assert shown.longest_silence() <= 3


@pytest.mark.parametrize(
    ("attack", "preset", "tokens"),
    some(product([Dlg, Tag], ["best", "faithful"], ["known", "unknown"]), every=3),
)
def test_a_descent_without_words_that_move_keeps_its_time_too(seen, passes, attack, preset, tokens):
    model, updates = seen
    attack = attack(preset=preset, starts=1, seconds=90, steps=200)
    (answer,), shown = run(attack, [updates[tokens]], model, passes)
    assert answer.status == Status.RECOVERED
    # Our own has 64 starts where the tokens are not known.
    starting = tokens == "unknown" and preset == "best"
    assert shown.at(90) == ("orders" if starting else "descent")
    assert 90 < passes.now <= 90 + FEW
    assert shown.longest_silence() <= 3


@pytest.mark.parametrize(
    ("preset", "tokens"), some(product(["best", "faithful"], ["known", "unknown"]), every=3)
)
def test_each_of_several_victims_has_its_seconds(seen, passes, monkeypatch, preset, tokens):
    monkeypatch.setattr(victims, "PASS", {"cpu": 10**9})
    model, updates = seen
    attack = Lamp(preset=preset, starts=1, seconds=10, discrete="never")
    answers, _ = run(attack, [updates[tokens]] * 3, model, passes)
    assert {answer.status for answer in answers} == {Status.RECOVERED}
    assert 30 < passes.now <= 30 + FEW


@pytest.mark.parametrize(
    ("attack", "preset", "tokens"),
    some(product([Lamp, Dlg, Tag], ["best", "faithful"], ["known", "unknown"]), every=5),
)
def test_without_any_time_there_is_an_answer(seen, passes, attack, preset, tokens):
    model, updates = seen
    (answer,), _ = run(attack(preset=preset, seconds=0.5), [updates[tokens]], model, passes)
    assert answer.status == Status.RECOVERED
    assert [len(ids) for ids in answer.sequences] == sorted(
        (len(ids) for ids in model.encode(TEXTS)), reverse=True
    )
    assert passes.now <= FEW


def test_out_of_time_two_sentences_exchange_nothing_more(small, observe, passes):
    model = small("bert", width=16, layers=1)
    truth = observe(model, ["she told us that", "he pays for it now"], granted=GRANTED)
    frozen = Watch(Clock(1))
    tried = []

    def algorithm(search):
        objective, config, rng, _ = search
        ids_RBT = objective.nearest_tokens(objective.space.random(objective.rows, rng))
        for now in (0, 2):
            passes.now = now
            found_RKBT = relaxed_tokens.exchange_candidates(
                Search(objective, config, rng, frozen), ids_RBT
            )
            tried.append(found_RKBT.shape[1])
        return best_of_each(objective.victim_R, ids_RBT, torch.zeros(len(rng)))

    method = replace(Lamp().method(), algorithm=algorithm)

    @dataclass(frozen=True)
    class Attack(GradientMatching):
        def method(self):
            return method

    run(Attack(starts=1), [truth.seen], model, passes)
    assert tried[0] > 1
    assert tried[1] == 1


def test_a_prior_that_is_stopped_scores_only_what_was_before():
    model = loading.load(ModelSpec(name="builtin/gpt2-tiny", task=CAUSAL_LM, num_labels=2))
    prior = priors.load("builtin/gpt2-tiny", model)
    ids_NT = torch.arange(40).view(8, 5) + 300
    every_N = prior.nll(ids_NT, torch.ones_like(ids_NT))
    answers = iter([False, False, True, True, True, True, True, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priors, "_LOGITS", {"cpu": 1})
        some_N = prior.nll(ids_NT, torch.ones_like(ids_NT), stop=lambda: next(answers))
    assert some_N.isfinite().sum() == 2
    finite_N = some_N.isfinite()
    torch.testing.assert_close(some_N[finite_N], every_N[finite_N])
