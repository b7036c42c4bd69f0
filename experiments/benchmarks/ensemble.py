"""Whether `auto` reads as much as each of its attacks alone, in the same time.

    python experiments/benchmarks/ensemble.py [--sizes 1 2] [--noise 0 0.3 3 30] [--seconds 20]

MiniLM (6 x 384, pretrained) as a classifier, whole update, over batches of CoLA sentences in an
order that the seed draws. The noise is Gaussian; its scale is given in root mean squares of the
gradient. Attacks are told lengths and labels, as those that match gradients are in the papers.
Every attack gets the same seconds for an update: CPU time of this process, so that others on the
machine do not matter.

Prints a line per batch size, noise and attack:

  words    content tokens of the sentences that the answer has, in the best match of sentences
  exact    sentences with equal token ids, special tokens aside, one to one
  proved   batches that the attack proves whole
  likely   batches that `auto` calls likely
  seconds  CPU time, the mean and the longest

The last table is what `auto` takes on proved batches beyond the attack that proved them, in units
of the client's own training step.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import parser_of, with_assets
from clocks import in_turns
from material import content, gradient_of, keep, root_mean_square, timed
from scipy.optimize import linear_sum_assignment
from subspace_attacks import MINILM, load, read_corpus

from fedleak import data
from fedleak.attacks import Attack, clock
from fedleak.attacks.analytic.position_marginals import PositionMarginals
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.data import Corpus
from fedleak.defenses.gaussian_noise import with_noise
from fedleak.models import LanguageModel
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation
from fedleak.util.rng import stream

ATTACKS: tuple[type[Any], ...] = (PositionMarginals, Keyspan, Dager, Lamp, Auto)

FACTS = ("lengths", "labels", "noise_scale")

Ids = tuple[int, ...]


class Answer(NamedTuple):
    """How an attack did on a batch."""

    size: int
    noise: float
    attack: str
    batch: int
    words: int
    words_of: int
    exact: int
    proved: bool
    likely: bool | None
    seconds: float


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.3, 3.0, 30.0])
    parser.add_argument("--attacks", nargs="+", default=[attack.kind for attack in ATTACKS])
    parser.add_argument("--batches", type=int, default=4, help="of each line")
    parser.add_argument("--seconds", type=float, default=20.0, help="for an update")
    parser.add_argument("--told", nargs="*", default=["lengths", "labels"], choices=FACTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the answers in this file")
    parser.add_argument("--cost", action="store_true", help="only the table of proved batches")
    args = with_assets(parser)
    torch.set_num_threads(1)
    args.device = "cpu"
    clock.now = time.process_time
    model, corpus = load(MINILM, args), read_corpus(args.assets, args.seed)
    answers: list[Answer] = []
    if not args.cost:
        print(HEADING)
    for size in [] if args.cost else args.sizes:
        for noise in args.noise:
            for batch in range(args.batches):
                for attack in ATTACKS:
                    if attack.kind in args.attacks:
                        limited = attack(seconds=args.seconds)
                        answers.append(ask(limited, model, corpus, size, noise, batch, args))
                        keep(answers, args.json)
            for attack in ATTACKS:
                some = [answer for answer in answers if answer[:3] == (size, noise, attack.kind)]
                if some:
                    print(line(some), flush=True)
    print(f"\n{'batch':>5} {'attack':<18} {'its ms':>9} {'auto ms':>9} {'step ms':>9} {'ratio':>6}")
    for size in args.sizes:
        print(cost(model, corpus, size, args), flush=True)


def observed(
    model: LanguageModel, corpus: Corpus, size: int, noise: float, batch: int, args: Any
) -> tuple[Observation, list[Ids]]:
    """Returns what the server sees of a batch, and the truth."""
    at = slice(batch * size, (batch + 1) * size)
    ids = data.tokenise(corpus.texts[at], model.encode, limit=model.max_length, max_length=None)
    update = local_update_(model, ids, corpus.labels[at], gradient_of(size), seed=args.seed)
    rng, scale = stream(args.seed, "noise", batch), noise * root_mean_square(update.tensors)
    if noise:
        update = with_noise(update, scale, rng)
    order = sorted(range(size), key=lambda i: -len(ids[i]))
    facts: dict[str, Any] = {
        "lengths": tuple(len(ids[i]) for i in order),
        "labels": tuple(corpus.labels[at][i] for i in order),
        "noise_scale": scale,
    }
    granted = {name: facts[name] for name in args.told}
    knowledge = Knowledge(local_steps=1, dropout=False, **granted)
    return Observation(round=1, client=0, update=update, knowledge=knowledge), [*map(tuple, ids)]


def ask(
    attack: Attack,
    model: LanguageModel,
    corpus: Corpus,
    size: int,
    noise: float,
    batch: int,
    args: Any,
) -> Answer:
    """Attacks a batch and scores the answer."""
    seen, ids = observed(model, corpus, size, noise, batch, args)
    answer, seconds = timed(attack, seen, model, stream(args.seed, attack.kind, batch))
    truth, recovered = content(model, ids), content(model, (answer.sequences or ())[:size])
    return Answer(
        size=size,
        noise=noise,
        attack=attack.kind,
        batch=batch,
        words=common(truth, recovered),
        words_of=sum(map(len, truth)),
        exact=(Counter(truth) & Counter(recovered)).total(),
        proved=answer.verified,
        likely=any(answer.diagnostics["likely"]) if "likely" in answer.diagnostics else None,
        seconds=seconds,
    )


def common(truth: Sequence[Ids], recovered: Sequence[Ids]) -> int:
    """Returns how many tokens two batches share, sentence by sentence in the best match."""
    if not recovered:
        return 0
    shared = [[(Counter(a) & Counter(b)).total() for b in recovered] for a in truth]
    rows, columns = linear_sum_assignment(shared, maximize=True)
    return sum(shared[i][j] for i, j in zip(rows, columns, strict=True))


def cost(model: LanguageModel, corpus: Corpus, size: int, args: Any) -> str:
    """Returns what auto takes beyond the attack that proves a batch, as a line."""
    seen, ids = observed(model, corpus, size, 0.0, 0, args)
    labels = corpus.labels[:size]

    def alone(attack: Attack) -> Any:
        return attack(seen, model, rng=stream(args.seed, "cost"))

    both = alone(Auto())
    if not both.verified:
        return f"{size:>5} nothing proved"
    single = next(attack for attack in ATTACKS if attack.kind == both.diagnostics["from"][0])()
    step, its, auto = in_turns(
        [
            lambda: local_update_(model, ids, labels, gradient_of(size), seed=args.seed),
            lambda: alone(single),
            lambda: alone(Auto()),
        ],
        repeats=5,
    )
    figures = f"{1e3 * its:>9.0f} {1e3 * auto:>9.0f} {1e3 * step:>9.0f}"
    return f"{size:>5} {single.kind:<18} {figures} {(auto - its) / step:>6.2f}"


HEADING = (
    f"{'batch':>5} {'noise':>6} {'attack':<18} {'words':>9} {'exact':>7} {'proved':>7} "
    f"{'likely':>7} {'seconds':>8} {'longest':>8}"
)


def line(some: Sequence[Answer]) -> str:
    """Returns the answers of an attack as text, below HEADING."""
    first, seconds = some[0], [answer.seconds for answer in some]
    words = f"{sum(answer.words for answer in some)}/{sum(answer.words_of for answer in some)}"
    exact = f"{sum(answer.exact for answer in some)}/{first.size * len(some)}"
    proved = f"{sum(answer.proved for answer in some)}/{len(some)}"
    known = [answer.likely for answer in some if answer.likely is not None]
    likely = f"{sum(known)}/{len(known)}" if known else "-"
    return (
        f"{first.size:>5} {first.noise:>6g} {first.attack:<18} {words:>9} {exact:>7} {proved:>7} "
        f"{likely:>7} {sum(seconds) / len(seconds):>8.1f} {max(seconds):>8.1f}"
    )


if __name__ == "__main__":
    main()
