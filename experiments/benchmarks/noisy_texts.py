"""What `maximum_likelihood` reads of updates of one text under Gaussian noise, beside `auto`.

    python experiments/benchmarks/noisy_texts.py [--sigmas 1e-3 3e-3] [--texts 20]

MiniLM (6 x 384, pretrained) as a classifier, one gradient of one sentence of CoLA's out-of-domain
set (in an order that the seed draws), with noise of standard deviation sigma on each number.
Nothing is told: no label, no length, no noise. `--attacks auto` and `before` (`auto` without
maximum_likelihood) are the ensemble. The prior is `--prior`, or none. Seconds are CPU time.

Prints a line per sigma and attack:

  exact       texts with equal token ids, and Wilson's 95 % interval in per cent
  ROUGE-L     the mean; `other`: that of the previous sentence's answer
  likely      texts that it calls likely, and how many of them are exact
  seconds     CPU time, the mean and the longest
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from subspace_attacks import MINILM, load, read_corpus

from fedleak import data
from fedleak.attacks import clock
from fedleak.attacks.auto import attack as ensemble
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.auto.maximum_likelihood import MaximumLikelihood
from fedleak.audit.metrics.intervals import wilson
from fedleak.audit.metrics.rouge import rouge
from fedleak.models import LanguageModel
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, Knowledge, Observation, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

ATTACKS = {"maximum_likelihood": MaximumLikelihood, "auto": Auto, "before": Auto}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sigmas", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--attacks", nargs="+", default=["maximum_likelihood"], choices=ATTACKS)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="for an update")
    parser.add_argument("--prior", help="a causal language model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assets", type=Path, default=os.environ.get("FEDLEAK_ASSETS"))
    args = parser.parse_args()
    if args.assets is None:
        parser.error("say where models and data are: --assets, or FEDLEAK_ASSETS")
    torch.set_num_threads(1)
    args.device, clock.now = "cpu", time.process_time
    model = load(MINILM, args)
    texts = read_corpus(args.assets, args.seed).texts[: args.texts]
    whole = ensemble.ENSEMBLE
    for sigma in args.sigmas:
        for name in args.attacks:
            old = tuple(pair for pair in whole if not isinstance(pair[0], MaximumLikelihood))
            ensemble.ENSEMBLE = old if name == "before" else whole
            attack = ATTACKS[name](seconds=args.seconds, prior=args.prior)
            rows = [answered(attack, model, text, i, sigma, args) for i, text in enumerate(texts)]
            print(line(f"{sigma:g} {name}", rows, model), flush=True)


def answered(
    attack: Any, model: LanguageModel, text: str, number: int, sigma: float, args: Any
) -> tuple[tuple[int, ...], tuple[int, ...], bool, float]:
    """Attacks an update; returns the text, the answer, whether it is called likely, and seconds."""
    ids = data.tokenise([text], model.encode, limit=model.max_length, max_length=None)
    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=1, epochs=1, learning_rate=1e-3, dropout=False
    )
    update = local_update_(model, ids, [number % 2], local, seed=args.seed + number)
    rng = stream(args.seed, "noise", number)
    tensors = {
        name: value + sigma * torch.randn(value.shape, generator=rng)
        for name, value in update.tensors.items()
    }
    known = Knowledge(local_steps=1, dropout=False)
    update = ClientUpdate(UpdateKind.GRADIENT, tensors, 1)
    seen = Observation(round=1, client=0, update=update, knowledge=known)
    begin = time.process_time()
    answer = attack(seen, model, rng=stream(args.seed, "attack", number))
    seconds = time.process_time() - begin
    (best, *_) = answer.sequences or [()]
    return tuple(ids[0]), tuple(best), any(answer.diagnostics.get("likely", [])), seconds


def line(name: str, rows: list[Any], model: LanguageModel) -> str:
    """Returns the answers to updates as text."""
    count, exact = len(rows), [ids == best for ids, best, *_ in rows]
    share = wilson(sum(exact), count)

    def mean(shift: int) -> float:
        pairs = zip(rows, [*rows[shift:], *rows[:shift]], strict=True)
        return sum(rouge(model.decode(b[1]), model.decode(a[0])).rougeL for a, b in pairs) / count

    likely, seconds = [row[2] for row in rows], [row[3] for row in rows]
    right = sum(a and b for a, b in zip(likely, exact, strict=True))
    return (
        f"{name:<28} exact {sum(exact)}/{count} [{100 * share.low:.0f}, {100 * share.high:.0f}]  "
        f"ROUGE-L {mean(0):.0f} (other {mean(1):.0f})  likely {sum(likely)}, right {right}  "
        f"seconds {sum(seconds) / count:.1f}, longest {max(seconds):.1f}"
    )


if __name__ == "__main__":
    main()
