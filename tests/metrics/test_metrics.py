import itertools
import math
import runpy
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import some
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import beta, binomtest

from fedleak.audit.metrics import intervals
from fedleak.audit.metrics.matching import assign, overlap
from fedleak.audit.metrics.rouge import Rouge, mean, rouge
from fedleak.audit.metrics.utility import evaluate
from fedleak.models import CAUSAL_LM

words = st.lists(st.sampled_from("abcd"), max_size=7).map(" ".join)
bags = st.lists(st.integers(0, 5), max_size=9)


# --- ROUGE ----------------------------------------------------------------------------------


def slow_rouge(answer, truth):
    """By enumeration: shared n-grams, and the longest of all common subsequences."""
    a, b = answer.split(), truth.split()

    def f_score(common, of_a, of_b):
        return 200 * common / (of_a + of_b) if common else 0.0

    def grams(tokens, n):
        return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

    def shared(n):
        x, y = grams(a, n), grams(b, n)
        return f_score((Counter(x) & Counter(y)).total(), len(x), len(y))

    def subsequences(tokens):
        return {s for n in range(len(tokens) + 1) for s in itertools.combinations(tokens, n)}

    longest = max(map(len, subsequences(a) & subsequences(b)))
    return Rouge(shared(1), shared(2), f_score(longest, len(a), len(b)))


@pytest.mark.core
@given(st.text(" aAbcö-!7\n", max_size=30), st.text(" aAbcö-!7\n", max_size=30))
def test_rouge_is_that_of_the_package_to_the_last_bit(answer, truth):
    scores = RougeScorer(list(Rouge._fields), use_stemmer=False).score(truth, answer)
    assert rouge(answer, truth) == tuple(100 * scores[name].fmeasure for name in Rouge._fields)


@pytest.mark.core
@given(words, words)
def test_rouge_is_that_of_enumeration(answer, truth):
    assert rouge(answer, truth) == pytest.approx(slow_rouge(answer, truth))


@pytest.mark.core
@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("She fell.", "she FELL", (100, 100, 100)),
        ("", "she fell", (0, 0, 0)),
        ("he rose", "she fell", (0, 0, 0)),
        ("fell she", "she fell", (100, 0, 50)),
        ("a b x d", "a b c d", (75, 100 / 3, 75)),
    ],
)
def test_rouge_of(answer, truth, expected):
    assert rouge(answer, truth) == pytest.approx(expected)


@pytest.mark.core
def test_the_mean_is_of_each_score():
    assert mean([Rouge(0, 10, 20), Rouge(100, 30, 21)]) == (50, 20, 20.5)


# --- one to one -----------------------------------------------------------------------------


@pytest.mark.core
@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_the_assignment_is_the_best_of_all(answers, truths, seed):
    table = np.random.default_rng(seed).integers(0, 6, (truths, answers)).astype(float)
    chosen = assign(answers, truths, lambda a, t: table[t, a])
    used = [a for a in chosen if a is not None]
    assert len(chosen) == truths
    assert len(used) == len(set(used)) == min(answers, truths)
    total = sum(table[t, a] for t, a in enumerate(chosen) if a is not None)
    assert total == best_by_hand(table)


def best_by_hand(table):
    """As many pairs as there can be, in every order."""
    truths, answers = table.shape
    size = min(truths, answers)
    return max(
        sum(table[t, a] for t, a in zip(rows, columns, strict=True))
        for rows in itertools.combinations(range(truths), size)
        for columns in itertools.permutations(range(answers), size)
    )


@pytest.mark.core
@given(bags, bags.filter(len))
def test_the_overlap_counts_each_token_once(answer, truth):
    tokens = [token for token in range(100) if token in answer]
    common = sum(token in truth for token in tokens)
    scores = overlap(set(answer), set(truth))
    assert scores.recall == common / len(set(truth))
    assert scores.precision == (common / len(tokens) if tokens else None)


# --- intervals ------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_intervals_are_the_published_ones(successes, trials, low, high):
    """Newcombe 1998, table I, and its formula."""
    interval = intervals.wilson(successes, trials)
    assert interval == pytest.approx((successes / trials, low, high), abs=5e-5)


def clopper_pearson(successes, trials):
    """From the quantiles of the beta distribution (Clopper and Pearson 1934)."""
    low = beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    high = beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
    return successes / trials, low, high


@pytest.mark.core
@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (0, 12), (12, 12), (4, 4), (3, 20), (81, 263)]
)
def test_of_clusters_that_are_all_or_nothing_the_interval_is_the_exact_one(successes, trials):
    values = [100.0] * successes + [0.0] * (trials - successes)
    for texts in (1, 3):
        interval = intervals.clustered_mean(
            np.repeat(values, texts), np.repeat(range(trials), texts), most=100.0
        )
        exact = np.multiply(clopper_pearson(successes, trials), 100)
        assert interval == pytest.approx(exact, abs=1.0)  # the quantile of so many draws
    # A batch is worth as many texts as it has, and still one client.
    weighted = intervals.clustered_mean(values, range(trials), [7] * trials, most=100.0)
    assert weighted == pytest.approx(interval)


@pytest.mark.core
def test_of_many_clients_it_is_the_interval_of_any_mean():
    values = np.random.default_rng(5).uniform(0, 1, 4000)
    interval = intervals.clustered_mean(values, range(4000), most=1.0)
    half = 1.96 * values.std() / math.sqrt(4000)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.high - interval.mean == pytest.approx(half, rel=0.15)
    assert interval.mean - interval.low == pytest.approx(half, rel=0.15)


@pytest.mark.core
@pytest.mark.parametrize("value", [0.0, 37.5, 100.0])
@pytest.mark.parametrize("clients", [1, 2, 12, 500])
def test_no_interval_has_zero_width_nor_leaves_the_bounds(value, clients):
    interval = intervals.clustered_mean([value] * clients, range(clients), most=100.0)
    assert 0 <= interval.low <= interval.mean == value <= interval.high <= 100
    assert interval.high - interval.low > 300 / (clients + 3)  # the rule of three, about


@pytest.mark.core
def test_what_is_alike_is_surer_than_what_is_not():
    alike = intervals.clustered_mean([49.0, 51.0] * 10, range(20), most=100.0)
    unlike = intervals.clustered_mean([0.0, 100.0] * 10, range(20), most=100.0)
    assert alike.high - alike.low < 0.5 * (unlike.high - unlike.low)


@pytest.mark.core
def test_repeating_a_client_s_value_makes_nothing_surer():
    values = np.random.default_rng(6).uniform(0.0, 1.0, 30)
    once = intervals.clustered_mean(values, range(30), most=1.0)
    often = intervals.clustered_mean(np.repeat(values, 9), np.repeat(range(30), 9), most=1.0)
    alone = intervals.clustered_mean(np.repeat(values, 9), range(270), most=1.0)
    assert often == pytest.approx(once)
    assert alone.high - alone.low < 0.5 * (often.high - often.low)


@pytest.mark.core
def test_large_clients_count_as_much_as_they_are():
    clusters = [c for c in range(40) for _ in range(9 if c % 2 else 1)]
    interval = intervals.clustered_mean([float(c % 2) for c in clusters], clusters, most=1.0)
    assert interval.mean == 0.9
    assert 0.7 < interval.low < 0.9 < interval.high < 1.0
    batches = intervals.clustered_mean([0.0, 1.0] * 20, range(40), [1, 9] * 20, most=1.0)
    assert batches == pytest.approx(interval)


@pytest.mark.core
def test_the_same_values_have_the_same_interval():
    values = np.random.default_rng(7).uniform(0, 1, 9)
    twice = [intervals.clustered_mean(values, range(9), most=1.0) for _ in range(2)]
    assert twice[0] == twice[1]


def leaked_texts(rate, alike, shape, rng):
    """Whether each text leaks, [clients, rounds, texts], of clients drawn at random.

    A client has a rate of its own, a beta variable with that mean, and each of its batches one
    around the client's; `alike` is the correlation at both levels: 1 is all of a client or none.
    """

    def around(means):
        if alike == 1 or rate in (0, 1):
            return (rng.random(means.shape) < means).astype(float)
        certain = np.clip(means, 1e-6, 1 - 1e-6)
        return rng.beta(certain * (1 / alike - 1), (1 - certain) * (1 / alike - 1))

    clients, rounds, _ = shape
    of_client = around(np.full((clients, 1, 1), rate))
    of_batch = around(np.broadcast_to(of_client, (clients, rounds, 1)))
    return rng.random(shape) < np.broadcast_to(of_batch, shape)


@pytest.mark.parametrize(
    ("rate", "shape", "alike"),
    some(
        product([0, 0.5, 0.98, 1], [(4, 3, 2), (12, 1, 4), (20, 1, 1)], [0.3, 0.9, 1]),
        every=5,
    ),
)
def test_intervals_cover_the_rate_of_correlated_batches(monkeypatch, rate, shape, alike):
    """Nominal 95 %; of shares of texts, and of scores from 0 to 100 that a leak makes 100."""
    monkeypatch.setattr(intervals, "MOST_DRAWS", 1000)
    rng, runs, covered = np.random.default_rng(8), 200, np.zeros(2)
    clients = np.repeat(range(shape[0]), shape[1])
    for _ in range(runs):
        leaked = leaked_texts(rate, alike, shape, rng)
        scores = np.where(leaked, 100, 100 * rng.beta(2, 8, shape))  # else by chance 20
        for i, (values, most, true) in enumerate(
            [(leaked, 1.0, rate), (scores, 100.0, 100 * rate + 20 * (1 - rate))]
        ):
            interval = intervals.clustered_mean(
                values.mean(-1).ravel(), clients, [shape[2]] * len(clients), most=most
            )
            covered[i] += interval.low <= true <= interval.high
    assert (covered / runs >= 0.93).all()


COVERAGE = runpy.run_path(
    str(Path(__file__).parents[2] / "experiments" / "benchmarks" / "coverage.py")
)
POPULATIONS = COVERAGE["POPULATIONS"]


@pytest.mark.parametrize(
    ("population", "clients"),
    [
        pytest.param(
            population,
            clients,
            id=f"{population.name}, {clients}",
            marks=[] if (place + few) % 2 else pytest.mark.slow,  # of every population one
        )
        for place, population in enumerate(POPULATIONS)
        for clients, few in ((3, True), (12, False))
    ],
)
def test_intervals_hold_where_the_size_of_a_client_says_how_much_of_it_is_read(
    monkeypatch, population, clients
):
    """No more than one and a half times nominal; `coverage.py` has all numbers of clients."""
    monkeypatch.setattr(intervals, "MOST_DRAWS", 1000)
    samples, most = 200, 1.5 * 0.025
    misses = COVERAGE["misses"](population, clients, samples)
    for share in (misses.below, misses.above, misses.below_of_clients, misses.above_of_clients):
        assert binomtest(round(share * samples), samples, most, "greater").pvalue > 1e-3
    if population.name == "few large ones are read" and clients == 12:  # so this can fail
        assert misses.below_unknown > 0.2
    if clients == 3:
        none = COVERAGE["differences"](population, clients, 50)
        assert none.apart <= 0.1
        assert none.rejected == 0  # three clients may agree by chance


# --- utility --------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("num_labels", [2, 3])
def test_utility_is_that_of_one_text_at_a_time(small, texts, num_labels):
    model = small("bert", num_labels=num_labels)
    sequences = model.encode(texts[:20])
    labels = [i * i % num_labels for i in range(20)]
    with torch.no_grad():
        logits = torch.stack([model.module(torch.tensor([ids])).logits[0] for ids in sequences])
        model.module.classifier.bias -= logits.mean(0)  # so that every class is predicted
        rows = [model.module(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in sequences]
    predicted = [int(row.argmax()) for row in rows]
    pairs = Counter(zip(labels, predicted, strict=True))
    utility = evaluate(model, sequences, labels)
    loss = -sum(float(row[y]) for row, y in zip(rows, labels, strict=True)) / 20
    assert utility["loss"] == pytest.approx(loss, rel=1e-5)
    assert utility["accuracy"] == sum(pairs[c, c] for c in range(num_labels)) / 20

    def f1(c):
        wrong = sum(n for (y, p), n in pairs.items() if (y == c) != (p == c))
        return 2 * pairs[c, c] / (2 * pairs[c, c] + wrong) if pairs[c, c] else 0.0

    seen = sorted(set(labels) | set(predicted))
    expected = f1(1) if num_labels == 2 else sum(map(f1, seen)) / len(seen)
    assert utility["f1"] == pytest.approx(expected)
    assert len(set(predicted)) > 1, "nothing to tell apart"
    if num_labels == 2:
        assert utility["mcc"] == pytest.approx(np.corrcoef(labels, predicted)[0, 1], abs=1e-9)


@pytest.mark.core
def test_a_causal_model_has_a_loss_and_a_perplexity(small, texts):
    model = small("gpt2", CAUSAL_LM)
    sequences = [ids[:9] for ids in model.encode(texts[:3])]
    with torch.no_grad():
        losses = [
            float(model.module(torch.tensor([s]), labels=torch.tensor([s])).loss) for s in sequences
        ]
    mean = sum(losses) / 3
    assert evaluate(model, sequences, [0, 0, 0]) == {
        "loss": pytest.approx(mean, rel=1e-5),
        "perplexity": pytest.approx(math.exp(mean), rel=1e-4),
    }
    # By tokens, not by texts or batches.
    sequences = [ids[: 3 + 5 * (i % 2)] for i, ids in enumerate(model.encode(texts[:17]))]
    with torch.no_grad():
        losses = [
            (len(s) - 1) * float(model.module(torch.tensor([s]), labels=torch.tensor([s])).loss)
            for s in sequences
        ]
    tokens = sum(len(s) - 1 for s in sequences)
    utility = evaluate(model, sequences, [0] * 17)
    assert utility["loss"] == pytest.approx(sum(losses) / tokens, rel=1e-5)
