"""Whether every attack ends when its `seconds` are over.

    python experiments/benchmarks/overrun.py [--attacks auto dager] [--models minilm] [--seconds 5]

Each attack gets `--seconds` for one update: texts of 8 to 500 tokens in batches of 1 to 16, of a
BERT (MiniLM, a classifier), a GPT-2 and a LLaMA (fedleak's built-in ones with 512 positions,
next-token training). A model with fewer positions gets texts as long as it has. The texts are
random tokens. `plain` updates are what a client sends; `noisy` ones have Gaussian noise of three
root mean squares of the gradient, so that nothing is proved and all the time is spent. No fact is
granted.

An attack keeps its promise if it ends within its seconds and one more, or a fifth more, whichever
is longer. Time is CPU time of a process that has one thread, so that others on the machine do not
matter; `command` starts a program of its own, so its time is by the clock on the wall. `probes` and
`membership` have no setting `seconds`: their lines say what they take.

Every case runs in a process of its own, which is ended after `--limit` seconds of CPU time, or when
it takes more than `--memory` GB. Prints a line per case that was late (`--all`: every case), the
worst of each attack, and the worst of all.
"""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from arguments import parser_of, with_assets
from material import gradient_of, keep, model_of, root_mean_square, save_random

from fedleak import attacks
from fedleak.attacks import clock
from fedleak.defenses.gaussian_noise import with_noise
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, builtin
from fedleak.training.local import local_update_
from fedleak.training.observation import Candidates, Example, Knowledge, Observation
from fedleak.util.rng import stream

POSITIONS = 512
NOISE = 3.0
LISTED, PUBLIC = 32, 30
PROGRAM = f"{sys.executable} -c 'import time; time.sleep(600)' {{observation}} {{answer}}"
TASKS = {"minilm": CLASSIFICATION, "gpt2-tiny": CAUSAL_LM, "llama-tiny": CAUSAL_LM}
OPTIONAL = {"bert-tiny": CLASSIFICATION, "stories15m": CAUSAL_LM}


class Case(NamedTuple):
    """What an attack is asked for."""

    attack: str
    model: str
    tokens: int
    size: int
    noisy: bool


class Result(NamedTuple):
    """How a case ended.

    Attributes:
        case: Which.
        taken: Seconds; None: it was ended, for the reason in `status`.
        status: Of the answer.
        time_up: What the answer says of its time.
    """

    case: Case
    taken: float | None
    status: str
    time_up: bool


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    kinds = [*sorted(attacks.always_on()), *sorted(attacks.kinds().keys() - attacks.always_on())]
    parser.add_argument("--attacks", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--models", nargs="+", default=[*TASKS], choices=[*TASKS, *OPTIONAL])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 500])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--updates", nargs="+", default=["plain", "noisy"])
    parser.add_argument("--seconds", type=float, default=5.0, help="for an update")
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds of a case")
    parser.add_argument("--memory", type=float, default=12.0, help="GB of address space of a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--all", action="store_true", help="print a line for every case")
    args = with_assets(parser)
    torch.set_num_threads(1)
    results: list[Result] = []
    print(HEADING, flush=True)
    for name in args.models:
        model = load(name, args)
        for tokens in sorted({min(tokens, model.max_length) for tokens in args.tokens}):
            for size in args.sizes:
                seen = {
                    kind: update(model, tokens, size, kind == "noisy", args)
                    for kind in args.updates
                }
                for attack in args.attacks:
                    for kind, observation in seen.items():
                        case = Case(attack, name, tokens, size, kind == "noisy")
                        results.append(ask(case, observation, model, args))
                        if args.all or late(results[-1], args):
                            print(line(results[-1], args), flush=True)
                        keep(results, args.json)
    print("\nthe worst of each attack\n" + HEADING)
    for attack in args.attacks:
        print(line(max((r for r in results if r.case.attack == attack), key=length), args))
    missed = sum(late(result, args) for result in results)
    print(f"\n{missed} of {len(results)} cases are late; the worst of all:")
    print(line(max((r for r in results if has_seconds(r.case.attack)), key=length), args))


def load(name: str, args: Any) -> LanguageModel:
    """Returns a model; built-in ones with room for long texts."""
    task = (TASKS | OPTIONAL)[name]
    if name in builtin.BUILTIN:
        with TemporaryDirectory() as folder:
            source = builtin.folder(name)
            save_random(source, folder, task, args.seed, max_position_embeddings=POSITIONS)
            return model_of(folder, task, args.seed)
    path = args.assets / "models" / {"minilm": "minilm-l6-h384"}.get(name, name)
    return model_of(path, task, args.seed)


def update(model: LanguageModel, tokens: int, size: int, noisy: bool, args: Any) -> Observation:
    """Returns what the server sees of a batch of random texts, and asks about some of them."""
    rng = stream(args.seed, "texts", tokens, size)
    listed, public = (
        tuple(Example(text(model, tokens, rng), i % 2) for i in range(number))
        for number in (LISTED, PUBLIC)
    )
    batch = listed[:size]
    labels = [example.label or 0 for example in batch]
    ids = [example.ids for example in batch]
    sent = local_update_(model, ids, labels, gradient_of(size), seed=args.seed)
    if noisy:
        sent = with_noise(sent, NOISE * root_mean_square(sent.tensors), rng)
    known = Knowledge(local_steps=1, dropout=False, candidates=Candidates(listed, public))
    return Observation(round=1, client=0, update=sent, knowledge=known)


def text(model: LanguageModel, tokens: int, rng: torch.Generator) -> tuple[int, ...]:
    """Returns a text of random tokens between the marks of the model."""
    (ids,) = model.encode(["a"])
    special = model.special_ids()
    at = next(i for i, token in enumerate(ids) if token not in special)
    plain = torch.tensor([t for t in range(len(model.tokenizer)) if t not in special])
    drawn = plain[torch.randint(len(plain), (tokens - len(ids) + 1,), generator=rng)].tolist()
    return (*ids[:at], *drawn, *ids[at + 1 :])


def ask(case: Case, seen: Observation, model: LanguageModel, args: Any) -> Result:
    """Attacks an update in a process of its own."""
    kind: Callable[..., Any] = attacks.kinds()[case.attack]
    options: dict[str, Any] = {"command": PROGRAM} if case.attack == "command" else {}
    if has_seconds(case.attack):
        options["seconds"] = args.seconds
    attack = kind(**options)
    if (why := attack.obstacle(attacks.AttackSetting.of(seen, model))) is not None:
        return Result(case, 0.0, f"out: {why}"[:60], False)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=attacked, args=(attack, case, seen, model, args, there))
    process.start()
    there.close()
    try:
        taken, status, time_up = here.recv()
    except EOFError:
        taken, status, time_up = None, "ended by --limit or --memory", False
    process.join()
    return Result(case, taken, status, time_up)


def attacked(
    attack: Any, case: Case, seen: Observation, model: LanguageModel, args: Any, there: Any
) -> None:
    """Attacks, and sends how long it took and how it ended."""
    gigabytes = int(args.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_CPU, (int(args.limit) + 1,) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes, gigabytes))
    now = time.monotonic if case.attack == "command" else time.process_time
    clock.now = now
    begin = now()
    try:
        answer = attack(seen, model, rng=stream(args.seed, attack.kind))
    except (RuntimeError, MemoryError) as error:
        there.send((None, f"{type(error).__name__}: {error}"[:60], False))
        return
    status = f"{answer.status}{', proved' if answer.verified else ''}"
    there.send((now() - begin, status, bool(answer.diagnostics.get("time_up"))))


def length(result: Result) -> float:
    """Returns the seconds a case took: infinite if it was ended."""
    return float("inf") if result.taken is None else result.taken


def late(result: Result, args: Any) -> bool:
    """Returns whether a case broke the promise."""
    allowed: float = args.seconds + max(1.0, 0.2 * args.seconds)
    return has_seconds(result.case.attack) and length(result) > allowed


def has_seconds(attack: str) -> bool:
    """Returns whether an attack has the setting."""
    return "seconds" in getattr(attacks.kinds()[attack], "__dataclass_fields__", {})


HEADING = (
    f"{'attack':<11} {'model':<11} {'tokens':>6} {'batch':>5} {'update':<6} {'asked':>6} "
    f"{'taken':>7} {'time up':<7} how it ended"
)


def line(result: Result, args: Any) -> str:
    """Returns a result as text, below HEADING."""
    case = result.case
    taken = f"> {args.limit:.0f}" if result.taken is None else f"{result.taken:.1f}"
    update = "noisy" if case.noisy else "plain"
    return (
        f"{case.attack:<11} {case.model:<11} {case.tokens:>6} {case.size:>5} {update:<6} "
        f"{args.seconds:>6g} {taken:>7} {'yes' if result.time_up else '-':<7} {result.status}"
    )


if __name__ == "__main__":
    main()
