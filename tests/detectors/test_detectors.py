"""What every detector owes, and what each finds: a new detector is in here without being named."""

import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.optim.adam import adam

from fedleak import detectors
from fedleak.detectors import Broadcast, Finding, Own, Seen, digest, look, named
from fedleak.detectors.movement import LONGEST as LONGEST_STEP
from fedleak.detectors.movement import Movement, longest_step
from fedleak.util import plugins
from fedleak.util.errors import FedleakError, UnknownKindError

pytestmark = pytest.mark.core

KINDS = sorted(detectors.kinds())
RATE, LONGEST = 0.1, 2.0


def weights(seed=0, width=48):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    return {
        "embeddings.word.weight": np.vstack([np.zeros((1, width), np.float32), drawn(200, width)]),
        "layer.0.dense.weight": drawn(4 * width, width),
        "layer.0.dense.bias": np.zeros(4 * width, np.float32),
        "layer.0.norm.weight": np.ones(width, np.float32),
        "layer.0.query.lora_A.default.weight": drawn(8, width),
        "layer.0.query.lora_B.default.weight": np.zeros((width, 8), np.float32),
        "classifier.weight": drawn(2, width),
    }


def moved(parameters, distance, seed=1):
    """The parameters, moved by an L2 distance."""
    rng = np.random.default_rng(seed)
    steps = {name: rng.standard_normal(value.shape) for name, value in parameters.items()}
    length = math.sqrt(sum((step**2).sum() for step in steps.values()))
    return {
        name: (value + steps[name] * distance / length).astype(np.float32)
        for name, value in parameters.items()
    }


def honest(**changes):
    """What a client sees in an honest round 3, two rounds after it was asked for the last time."""
    before = weights()
    now = moved(before, 2 * RATE * LONGEST)
    settings = {"dropout": True, "batch_size": 8}
    seen = Seen(
        now=Broadcast(3, now),
        before=Broadcast(1, before),
        shapes={name: value.shape for name, value in before.items()},
        settings=settings,
        contract=settings,
        movement=Movement(rate=RATE),
        longest=LONGEST,
        hashes={1: digest(before), 3: digest(now)},
        published={1: [digest(before)], 3: [digest(now)] * 2},
        own=Own(
            loss=lambda: 0.7,
            gradient_norm=lambda: 1.2,
            example_norms=lambda: {"layer.0.dense.weight": np.array([1.0, 1.5, 0.5])},
        ),
    )
    return replace(seen, **changes)


def sent(**parameters):
    """An honest round, but for some parameters."""
    names = {name.split(".")[-2]: name for name in weights()}
    changed = {names[short]: value for short, value in parameters.items()}
    return honest(now=Broadcast(3, {**honest().now.parameters, **changed}))


def with_limit(kind):
    """The detector; one that has no limit by itself gets one that an honest round is below."""
    limits = {"gradient_norm": 5.0, "loss": 2.0, "d_snr": 3.0}
    return named(kind, **({"limit": limits[kind]} if kind in limits else {}))


# --- what all have in common ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_says_what_it_found_and_what_it_costs(kind):
    detector = with_limit(kind)
    finding = detector(honest())
    assert not finding.alarm, finding
    assert finding.statistic is None or finding.limit is not None
    assert finding.sentence == finding.sentence.strip()
    assert finding.sentence[0].islower() or finding.sentence[0].isdigit() or "'" in finding.sentence
    assert detector.cost
    assert detector.action == "warn"
    assert detector(honest()) == finding, "it is no function of what the client sees"
    with pytest.raises(FrozenInstanceError):
        detector.action = "refuse"


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_that_sees_next_to_nothing_is_silent(kind):
    finding = with_limit(kind)(replace(Seen(now=honest().now), shapes=honest().shapes))
    assert not finding.alarm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong", [{"action": "shout"}, {"action": 1}, {"limit": -1}, {"factor": 0}]
)
def test_settings_are_checked(kind, wrong):
    cls = detectors.kinds()[kind]
    if not wrong.keys() <= {field for field in cls.__dataclass_fields__}:
        return
    with pytest.raises(ValidationError):
        TypeAdapter(cls).validate_json(json.dumps(wrong), strict=True)


@pytest.mark.parametrize("kind", sorted({"gradient_norm", "loss", "d_snr"}))
def test_what_has_no_limit_never_alarms(kind):
    loud = Own(
        loss=lambda: 1e9,
        gradient_norm=lambda: 1e9,
        example_norms=lambda: {"layer.0.dense.weight": np.array([1e9, 1.0])},
    )
    finding = named(kind)(honest(own=loud))
    assert finding.statistic >= 1e9 * 0.99
    assert not finding.alarm
    assert with_limit(kind)(honest(own=loud)).alarm


def test_a_detector_is_found_by_its_kind():
    assert named("jump", action="refuse").action == "refuse"
    with pytest.raises(UnknownKindError, match="did you mean 'jump'"):
        named("jumb")


@pytest.fixture
def forget():
    def forget():
        detectors.kinds.cache_clear()
        plugins.discover.cache_clear()

    forget()
    yield
    forget()


def test_a_package_adds_a_detector_and_a_wrong_one_is_said(forget, monkeypatch, tmp_path):
    (tmp_path / "acme_watch.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedleak.detectors import Detector, Finding\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Moon(Detector):\n"
        "    kind = 'moon'\n"
        "    cost = 'a look out of the window'\n"
        "    def __call__(self, seen):\n"
        "        return Finding('it is full', 1.0, 0.5)\n"
        "class Sun:\n"
        "    kind = 'sun'\n"
    )
    point = EntryPoint("anything", "acme_watch", "fedleak.detectors")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [point] if group == "fedleak.detectors" else []
    )
    assert look([named("moon")], honest())[0].alarm
    (reason,) = plugins.discover(detectors).broken.values()
    assert reason == "it is no Detector: let it inherit from fedleak.detectors.Detector"


def test_a_detector_that_fails_is_named():
    broken = replace(honest(), own=Own(loss=lambda: 1 / 0, gradient_norm=None, example_norms=None))
    with pytest.raises(FedleakError, match="the detector loss failed: ZeroDivisionError"):
        look([named("loss")], broken)


def test_what_is_no_number_is_an_alarm():
    assert Finding("", float("nan"), 1.0).alarm
    assert Finding("", float("inf"), 1.0).alarm
    assert not Finding("", 1.0, 1.0).alarm


def test_looking_at_weights_takes_neither_torch_nor_flower():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['flwr'] = None\n"
        "import numpy as np\nfrom fedleak import detectors\n"
        "seen = detectors.Seen(now=detectors.Broadcast(1, {'w': np.ones((3, 3), np.float32)}))\n"
        "print(len(detectors.look([detectors.named(k) for k in detectors.kinds()], seen)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(KINDS)


# --- what each finds ------------------------------------------------------------------------


def test_hashes_tell_names_types_shapes_and_numbers_apart():
    first = {"a": np.arange(6, dtype=np.float32), "b": np.zeros(2, np.float32)}
    others = [
        {"a": first["a"].reshape(2, 3), "b": first["b"]},
        {"a": first["a"].astype(np.float64), "b": first["b"]},
        {"b": first["a"], "a": first["b"]},
        {"a": first["a"], "b": np.array([0, -0.0], np.float32)},
        {"a": first["a"]},
    ]
    assert len({digest(first), *map(digest, others)}) == 6
    assert digest(dict(reversed(first.items()))) == digest(first)


def test_another_model_for_another_client_is_found_also_a_round_later():
    same, other = digest(honest().now.parameters), digest(weights(9))
    assert named("same_model")(honest(published={3: [same, other]})).alarm
    late = named("same_model")(honest(published={1: [other], 3: [same]}))
    assert late.alarm
    assert "1 in round 1" in late.sentence


def test_shapes_finds_what_is_missing_new_or_wider():
    here = honest().now.parameters
    wider = {**here, "classifier.weight": np.zeros((3, 48), np.float32)}
    less = {name: value for name, value in here.items() if name != "classifier.weight"}
    for other in (wider, less, {**here, "head.weight": np.zeros((2, 2), np.float32)}):
        finding = named("shapes")(honest(now=Broadcast(3, other)))
        assert finding.statistic == 1
        assert finding.alarm


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_a_jump_is_farther_than_factor_times_the_gradients_of_own_examples(times):
    limit = 2 * RATE * 5 * 7.0 * LONGEST
    movement = Movement(rate=RATE, steps=5)
    seen = honest(now=Broadcast(3, moved(weights(), times * limit)), movement=movement)
    assert named("jump", factor=7.0)(seen).alarm == (times > 1)


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_a_jump_is_farther_than_clipping_and_noise_allow(times):
    """The norm of Gaussian noise on n numbers is about sqrt(n): the bound adds six to it."""
    numbers = sum(value.size for value in weights().values())
    movement = Movement(rate=RATE, most=3.0, noise=0.5)
    limit = 2 * (3.0 + 0.5 * (math.sqrt(numbers) + 6))
    seen = honest(now=Broadcast(3, moved(weights(), times * limit)), movement=movement)
    assert named("jump")(replace(seen, longest=1e-9)).alarm == (times > 1)


def test_in_its_first_round_the_model_equals_the_public_checkpoint():
    checkpoint = weights()
    same = honest(now=Broadcast(1, checkpoint), before=Broadcast(1, checkpoint), longest=None)
    assert not named("jump")(same).alarm
    changed = {**checkpoint, "classifier.weight": checkpoint["classifier.weight"].copy()}
    changed["classifier.weight"][0, 0] += 1e-6
    assert named("jump")(replace(same, now=Broadcast(1, changed))).alarm


@pytest.mark.parametrize(
    "lacks", [{"longest": None}, {"movement": None}, {"movement": Movement(noise=None)}]
)
def test_where_nothing_is_known_of_honest_updates_there_is_no_limit(lacks):
    finding = named("jump")(honest(**lacks))
    assert (finding.limit, finding.alarm) == (None, False)


@pytest.mark.parametrize("kind", ["jump", "adam_bound"])
def test_a_server_that_goes_back_is_suspect(kind):
    adam = Movement(optimiser="adam", rate=0.1)
    assert named(kind)(honest(now=Broadcast(0, weights()), movement=adam)).alarm


def test_a_model_that_is_no_numbers_jumps():
    broken = {**weights(), "classifier.weight": np.full((2, 48), np.nan, np.float32)}
    adam = Movement(optimiser="adam", rate=0.1)
    for movement in (Movement(rate=RATE), adam):
        assert named("jump")(honest(now=Broadcast(3, broken), movement=movement)).alarm
    assert named("adam_bound")(honest(now=Broadcast(3, broken), movement=adam)).alarm
    assert named("rank")(honest(now=Broadcast(3, broken))).alarm


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [100, 512])
def test_a_number_that_is_none_hides_no_parallel_rows(rows, number):
    imprinted = np.ones((rows, 64), np.float32)
    imprinted[3, 5] = number
    assert named("parallel_rows")(honest(now=Broadcast(3, {"dense.weight": imprinted}))).alarm


def worst_gradients(steps):
    """The gradients that take Adam's last of so many steps farthest: equality in Cauchy-Schwarz."""
    return [(0.9 / 0.999) ** (steps - step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("steps", [1, 2, 10, 60])
def test_no_gradients_take_adam_farther_than_its_bound(steps):
    """Against torch's own Adam: random gradients stay below, and the worst ones reach the bound."""

    def last_step(gradients):
        number, first, second = torch.zeros(1).double(), torch.zeros(1).double(), torch.zeros(1)
        second, count = second.double(), torch.tensor(0.0)
        for gradient in gradients:
            before = number.clone()
            adam(
                [number], [torch.tensor([gradient]).double()], [first], [second], [], [count],
                foreach=False, amsgrad=False, beta1=0.9, beta2=0.999, lr=1.0, weight_decay=0.0,
                eps=1e-30, maximize=False,
            )  # fmt: skip
        return abs(float(number - before))

    assert last_step(worst_gradients(steps)) == pytest.approx(longest_step(steps), rel=1e-4)
    rng = np.random.default_rng(steps)
    for scale in (0.0, 1.0, 3.0):
        gradients = rng.standard_normal(steps) * np.exp(scale * rng.standard_normal(steps))
        assert last_step(gradients) <= longest_step(steps) * (1 + 1e-6)


@pytest.mark.parametrize("times", [0.99, 1.01])
@pytest.mark.parametrize(
    ("movement", "allowed"),
    [
        (Movement(optimiser="adam", rate=0.01), sum(map(longest_step, (1, 2)))),
        (
            Movement(optimiser="adam", rate=0.01, steps=4, anew=True),
            2 * sum(map(longest_step, range(1, 5))),
        ),
    ],
)
def test_a_number_that_moves_farther_than_adam_is_found(times, movement, allowed):
    now = {name: value.copy() for name, value in weights().items()}
    now["classifier.weight"][1, 3] += times * 0.01 * allowed
    finding = named("adam_bound")(honest(now=Broadcast(3, now), movement=movement))
    assert finding.statistic == pytest.approx(times, rel=1e-3)
    assert finding.alarm == (times > 1)
    assert "classifier.weight" in finding.sentence


def test_a_round_that_no_run_reaches_has_a_bound_at_once():
    """A server that says so would else keep a client counting."""
    movement = Movement(optimiser="adam", rate=0.5)
    steps = sum(map(longest_step, range(7, 20_007)))
    assert steps < movement.by_adam(7, 20_007) / 0.5 < 1.002 * steps
    assert movement.by_adam(1, 2**62) == pytest.approx(0.5 * LONGEST_STEP * 2**62, rel=1e-3)
    assert max(map(longest_step, (10**4, 10**6, 2**62))) < LONGEST_STEP


def test_zeros_are_found_in_factors_heads_and_norms_and_not_where_they_are_honest():
    for zeroed in (
        {"norm": np.zeros(48, np.float32)},
        {"classifier": np.zeros((2, 48), np.float32)},
        {"word": np.zeros((201, 48), np.float32)},
    ):
        finding = named("zeros")(sent(**zeroed))
        assert finding.statistic == 1.0
        assert finding.alarm
    A = "layer.0.query.lora_A.default.weight"
    factors = {**honest().now.parameters, A: np.zeros((8, 48), np.float32)}
    assert named("zeros")(honest(now=Broadcast(3, factors))).alarm


def test_rank_is_that_of_numpy():
    rng = np.random.default_rng(2)
    for rank in (1, 20, 30, 48):
        low = rng.standard_normal((192, rank)) @ rng.standard_normal((rank, 48))
        finding = named("rank")(sent(dense=low.astype(np.float32)))
        assert finding.statistic == pytest.approx(1 - rank / 48)
        assert finding.alarm == (rank < 24)


def test_parallel_rows_are_found_in_rows_and_in_columns():
    rng = np.random.default_rng(3)
    rows = np.outer(rng.standard_normal(192), rng.standard_normal(48)).astype(np.float32)
    rows += 1e-3 * rng.standard_normal(rows.shape).astype(np.float32)
    for turned in (rows, rows.T):
        assert named("parallel_rows")(sent(dense=turned)).alarm
    cosines = [
        abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)
        for i, a in enumerate(rows)
        for b in rows[:i]
    ]
    statistic = named("parallel_rows")(sent(dense=rows)).statistic
    assert statistic == pytest.approx(np.median(cosines), abs=1e-3)


def test_a_sum_does_not_tell_which_rows_are_compared():
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(1, 64)), 512, 0) + 0.01 * rng.normal(size=(512, 64))
    rows[:112] = rng.normal(size=(112, 64))
    # A sum stays the same in any order, so it would tell the places beforehand.
    by_sum = np.random.default_rng(int(abs(rows.sum()) * 1e6))
    places = by_sum.choice(512, 256, replace=False)
    arranged = np.empty_like(rows)
    arranged[places] = rows[:256]
    arranged[np.setdiff1d(np.arange(512), places)] = rows[256:]
    assert named("parallel_rows")(sent(dense=arranged)).alarm


def test_d_snr_is_the_ratio_of_the_paper_and_leaves_embeddings_out():
    norms = {
        "layer.0.dense.weight": np.array([3.0, 1.0, 1.0]),
        "embeddings.word.weight": np.array([9.0, 1.0]),
        "layer.0.dense.bias": np.array([9.0, 1.0]),
    }
    own = replace(honest().own, example_norms=lambda: norms)
    assert named("d_snr")(honest(own=own)).statistic == 1.5
    norms["layer.1.dense.weight"] = np.array([np.inf, 1.0])  # too large for its precision
    now = Broadcast(3, {**weights(), "layer.1.dense.weight": weights()["layer.0.dense.weight"]})
    assert with_limit("d_snr")(honest(now=now, own=own)).alarm


def test_a_changed_setting_is_named_unless_it_may_change():
    seen = honest(settings={"dropout": False, "batch_size": 8})
    finding = named("settings")(seen)
    assert finding.alarm
    assert "dropout from True to False" in finding.sentence
    assert not named("settings", may_change=("dropout",))(seen).alarm
