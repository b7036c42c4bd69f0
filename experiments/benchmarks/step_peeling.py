"""What `step_peeling` reads from local steps of SGD on a decoder, and `dager` beside it.

    python experiments/benchmarks/step_peeling.py --model FOLDER --texts FILE [--rate 1e-3]
        [--count 14] [--batch 2] [--epochs 1] [--momentum 0.9] [--clip 1.0] [--clients 6]

FILE has a text on each line; those of 4 to 24 words are drawn. Each client makes steps over texts
of its own. Nothing is told but how clients step. Seconds are CPU time of this process; the proof by
replay has a minute of its own.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from arguments import parser_of
from material import lines_of, model_of, timed
from state_pursuit import EARLIER, sent

from fedleak.attacks import Attack, clock, replay
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.step_peeling import StepPeeling
from fedleak.audit.metrics.intervals import wilson
from fedleak.models import CAUSAL_LM
from fedleak.training.recipe import Recipe
from fedleak.util.rng import stream


def main() -> None:
    """Prints a line for each client, and the totals."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, type=Path)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--count", type=int, default=14, help="texts of a client")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--clip", type=float, help="L2 norm of a step's gradient")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock.now = time.process_time
    model = model_of(options.model, CAUSAL_LM)
    lines = lines_of(options.texts, 4, options.seed)
    texts = [tuple(ids) for ids in model.encode(lines[: options.clients * options.count])]
    how = replace(
        EARLIER,
        recipe=Recipe(momentum=options.momentum, max_grad_norm=options.clip),
        batch_size=options.batch,
        learning_rate=options.rate,
        epochs=options.epochs,
    )
    limit = options.seconds
    attacks: list[Attack] = [StepPeeling(seconds=limit), Dager(seconds=limit)]
    exact, proved = {attack.kind: 0 for attack in attacks}, 0
    for client in range(options.clients):
        own = texts[client * options.count :][: options.count]
        seen, parts = sent(model, own, how), list[str]()
        for attack in attacks:
            answer, seconds = timed(attack, seen, model, stream(options.seed, "attack", client))
            sequences = answer.sequences or ()
            # DAGER leaves out the end token, which it does not see.
            read = {*sequences, *((*ids, model.tokenizer.eos_token_id) for ids in sequences)}
            right = len({*own} & read)
            exact[attack.kind] += right
            parts.append(f"{attack.kind} {right} exact, {seconds:.1f} CPU-s")
            if isinstance(attack, StepPeeling):
                made = replay.replay(model, sequences, seen)
                certain = made is not None and made.verified
                proved += certain
                parts.append(f"steps {answer.diagnostics['steps']}" + ", proved" * certain)
        tokens = sum(len(ids) - 1 for ids in own)
        print(f"{client}: {len(own)} texts, {tokens} tokens: {'; '.join(parts)}", flush=True)
    total = options.clients * options.count
    for kind, right in exact.items():
        share = wilson(right, total)
        interval = f"[{100 * share.low:.0f}, {100 * share.high:.0f}]"
        print(f"{kind}: {right} of {total} texts exact {interval}")
    print(f"{proved} of {options.clients} updates proved by replay")


if __name__ == "__main__":
    main()
