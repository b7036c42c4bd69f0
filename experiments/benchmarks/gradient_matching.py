"""How much faster gradient matching is than LAMP as its paper states it, and that both agree.

    python experiments/benchmarks/gradient_matching.py [--sizes 6x384 12x768]

Prints, for BERT classifiers of random weights and one sentence a victim, what `straightforward` and
fedleak take for the same inputs in the same run: medians of CPU time (on a GPU: of time), in turns.
All parameters but the word embedding are matched, and but the key biases, whose true gradient is
zero.

  step ...       a step of Adam, embedding norms included; per victim
  moves          the discrete phase of one victim with a GPT-2 of the same size: LAMP's draws. We
                 score equal ones once
  moves, each    the same per distinct order: what is left without that
  start          one of the random starts; per victim
  schedule       LAMP's 2000 steps, 24 rounds of 200 moves and 1000 starts. COMPOSED of the lines
                 above, not run; steps and starts of one victim or of several in a batch

  mixed          bfloat16 in 80 % of the steps and to rank starts and moves; the best moves are
                 judged again in float32

The columns: milliseconds of both, their ratio, and the largest differences: of losses (of moves:
their score, likelihood included), and of the gradient relative to its largest element. The last
table is the most memory that tensors take beside models and observed gradients, per victim.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from arguments import parser_of
from clocks import CPU, in_turns, peak
from material import bert_config
from straightforward import Attack, Search, gradients, scores
from torch import Tensor
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from fedleak import models
from fedleak.attacks.matching import optimizer, reorderings
from fedleak.attacks.matching.batch_structure import Rows, Shape, rows_of
from fedleak.attacks.matching.candidate_selection import best_of_batch, lm_penalty
from fedleak.attacks.matching.factored_gradients import BatchGradients, tables
from fedleak.attacks.matching.gradient_distance import Loss, distance_of, target_of
from fedleak.attacks.matching.lamp import FAITHFUL, better_order
from fedleak.attacks.matching.objective import Objective, lower_precision
from fedleak.attacks.matching.optimizer import ROUGH, Descent, initial
from fedleak.attacks.matching.parametrization import FreeEmbeddings
from fedleak.models import CLASSIFICATION, Frame, LanguageModel
from fedleak.models.prior import Prior

CONFIG = FAITHFUL["base"]
NOISE = 0.1
"""Norm of the noise on an observed tensor, as a share of the tensor's own."""

FIRST, LAST = 1, 2
"""Token ids that begin and end a sentence."""


class Size(NamedTuple):
    """Layers and hidden size of both models."""

    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.hidden}"


class Line(NamedTuple):
    """A line of the table: seconds of both, and differences if they were compared."""

    name: str
    straightforward: float
    ours: float
    loss: float | None = None
    gradient: float | None = None

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.straightforward / self.ours


class Memory(NamedTuple):
    """A line of the table of memory: bytes for each victim."""

    name: str
    tensors: float


class Bench(NamedTuple):
    """Several victims of one model, for both versions.

    Attributes:
        model: Their model.
        plain: A copy of it that nobody listens to.
        prior: The language model.
        rows: What is known of each victim.
        observed: What each sent, by parameter name.
        exact: Objective of all.
        rough: The same in bfloat16.
        start_RBTD: Where they begin.
        seed: Of random choices.
    """

    model: LanguageModel
    plain: Any
    prior: Prior
    rows: Rows
    observed: list[dict[str, Tensor]]
    exact: Objective
    rough: Objective
    start_RBTD: Tensor
    seed: int

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.model.device

    @property
    def norm(self) -> float:
        """The mean norm of word embeddings."""
        return float(self.exact.space.table_VD.norm(dim=-1).mean())

    @property
    def mixed(self) -> Objective:
        """The objective in mixed precision."""
        return replace(self.exact, rough=self.rough, prior=self.rough.prior)

    def attack(self, r: int, loss: Loss, observed: Sequence[dict[str, Tensor]]) -> Attack:
        """Returns the straightforward attack on victim r."""
        return Attack(self.plain, observed[r], int(self.rows.labels_RB[r, 0]), loss)

    def matching(self, loss: Loss, observed: list[dict[str, Tensor]]) -> Objective:
        """Returns an objective of all victims."""
        whole = list(observed[0]) if loss == "l2l1" else tables(self.model)
        target = target_of(observed, self.rows.mask_RBT.shape[2], whole)
        return replace(self.exact, target=target, distance=distance_of(loss))

    def only(self, objective: Objective) -> Objective:
        """Returns the objective of the first victim alone."""
        return objective.take(torch.tensor([0]))

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Lets both objectives listen to their models within the block."""
        with self.exact.batch_gradients.ready(), self.rough.batch_gradients.ready():
            yield

    def rngs(self, rows: int) -> list[torch.Generator]:
        """Returns a stream of random numbers for each row."""
        return [torch.Generator().manual_seed(self.seed + r) for r in range(rows)]


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["6x384", "12x768"])
    parser.add_argument("--tokens", type=int, default=16, help="of a sentence, special ones too")
    parser.add_argument("--victims", type=int, default=8, help="in a batch")
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    parser.add_argument("--scored", type=int, default=10, help="moves that are scored one by one")
    parser.add_argument("--many", type=int, default=1024, help="guesses whose memory is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=CPU, help="or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the lines in this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kept: list[dict[str, object]] = []
    for size in map(size_of, args.sizes):
        made = bench(
            size, args.tokens, args.victims, args.vocabulary, args.seed, device=args.device
        )
        with made.ready():
            print(heading(size), flush=True)
            for line in measure(made, args.repeats, args.scored):
                print(row(line), flush=True)
                kept.append({"size": str(size), **line._asdict()})
            for used in memory(made, args.many):
                print(f"{used.name:<41} {used.tensors / 2**20:8.1f} MiB", flush=True)
                kept.append({"size": str(size), **used._asdict()})
    if args.json:
        args.json.write_text(
            json.dumps({"settings": vars(args), "lines": kept}, default=str) + "\n"
        )


def size_of(text: str) -> Size:
    """Returns the size that is written so, such as 6x384."""
    layers, hidden = text.split("x")
    return Size(int(layers), int(hidden))


def bench(
    size: Size,
    tokens: int,
    victims: int,
    vocabulary: int,
    seed: int,
    *,
    device: torch.device = CPU,
    lengths: Sequence[int] | None = None,
) -> Bench:
    """Makes models of random weights, and victims with random sentences.

    Args:
        size: Of both models.
        tokens: Of each sentence, or of the longest.
        victims: How many.
        vocabulary: Tokens of both models.
        seed: Of all random numbers.
        device: Where to.
        lengths: Tokens of each sentence, where they differ.
    """
    lengths = lengths or [tokens] * victims
    torch.manual_seed(seed)
    heads = max(1, size.hidden // 64)
    config = bert_config(vocabulary, size.layers, size.hidden, heads)
    module = BertForSequenceClassification(config).eval().to(device)
    model = LanguageModel(
        module=module,
        tokenizer=SimpleNamespace(pad_token_id=0),
        family=models.families()["bert"],
        task=CLASSIFICATION,
    )
    causal = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_layer=size.layers, n_embd=size.hidden, n_head=heads)
    )
    prior = Prior(causal.eval().requires_grad_(False).to(device), None)
    plain = copy.deepcopy(module)
    shapes = [Shape((length,), (r % 2,)) for r, length in enumerate(lengths)]
    rows = rows_of(shapes, Frame((FIRST,), (LAST,)), model)
    table_VD = module.bert.embeddings.word_embeddings.weight.detach()
    ids_RT = torch.randint(LAST + 1, vocabulary, (victims, tokens)).to(device)
    ids_RT = torch.where(rows.fixed_RBT[:, 0], rows.ids_RBT[:, 0], ids_RT)
    left_out = {model.family.word_embedding} | model.family.null_parameters(model.trained())
    names = [name for name in model.trained() if name not in left_out]
    observed = [
        gradients(plain, names, table_VD[ids_T[:length]], r % 2, differentiable=False)
        for r, (ids_T, length) in enumerate(zip(ids_RT, lengths, strict=True))
    ]
    space = FreeEmbeddings(
        model=model,
        table_VD=table_VD,
        allowed_M=torch.arange(vocabulary, device=device),
        norm=float(table_VD.norm(dim=-1).mean()),
    )
    exact = Objective(
        model=model,
        batch_gradients=BatchGradients(model, names),
        distance=distance_of("cos"),
        target=target_of(observed, tokens, tables(model)),
        rows=rows,
        space=space,
        victim_R=torch.arange(victims, device=device),
        normalizer_R=torch.ones(victims, device=device),
        exact_R=torch.zeros(victims, device=device),
        prior=prior,
    )
    low = lower_precision(model)
    rough = replace(
        exact,
        model=low,
        batch_gradients=BatchGradients(low, names),
        target=exact.target.to(torch.bfloat16),
        prior=prior.to(torch.bfloat16),
    )
    start = space.start(rows, [torch.Generator().manual_seed(seed + r) for r in range(victims)])
    known = table_VD[rows.ids_RBT]
    start_RBTD = torch.where(rows.fixed_RBT[..., None], known, space.scaled(start))
    return Bench(model, plain, prior, rows, observed, exact, rough, start_RBTD, seed)


def measure(made: Bench, repeats: int, scored: int) -> Iterator[Line]:
    """Yields the lines of one size."""
    several, observed = f"{len(made.observed)} victims", made.observed
    alone = step("step, alone", made, made.only(made.exact), "cos", observed, repeats)
    yield alone
    batch = step(f"step, {several}", made, made.exact, "cos", observed, repeats)
    yield batch
    alone_low = step("step, alone, bfloat16", made, made.only(made.mixed), "cos", observed, repeats)
    yield alone_low
    batch_low = step(f"step, {several}, bfloat16", made, made.mixed, "cos", observed, repeats)
    yield batch_low
    exact, mixed = moves_(made, repeats, scored)
    yield from (*exact, *mixed)
    start, start_low = starts(made, repeats)
    yield from (start, start_low)
    yield schedule("schedule, alone", [alone], exact[0], start)
    yield schedule(f"schedule, {several}", [batch], exact[0], start)
    yield schedule("schedule, alone, mixed", [alone_low, alone], mixed[0], start_low)
    yield schedule(f"schedule, {several}, mixed", [batch_low, batch], mixed[0], start_low)
    # These targets are as large as the model, for each victim: one after the other.
    tag = made.matching("l2l1", observed)
    yield step(f"step, {several}, l2l1", made, tag, "l2l1", observed, repeats)
    del tag
    noisy = [noised(tensors, made.seed + r) for r, tensors in enumerate(observed)]
    full = made.matching("cos", noisy)
    yield step(f"step, {several}, noisy", made, full, "cos", noisy, repeats)


def step(
    name: str,
    made: Bench,
    objective: Objective,
    loss: Loss,
    observed: Sequence[dict[str, Tensor]],
    repeats: int,
) -> Line:
    """Compares a step of Adam."""
    start_RBTD = made.start_RBTD[: len(objective.normalizer_R)]
    loss_of = CONFIG.loss(objective, 1)
    apart, grad_apart = 0.0, 0.0
    variables_RBTD = start_RBTD.clone().requires_grad_()
    loss_R = loss_of(variables_RBTD)
    (grad_RBTD,) = torch.autograd.grad(loss_R.sum(), variables_RBTD)
    for r, variables in enumerate(start_RBTD[:, 0]):
        attack, x_TD = made.attack(r, loss, observed), variables.clone().requires_grad_()
        objective_1 = attack.objective(x_TD, made.norm, CONFIG.norm_weight)
        (grad_TD,) = torch.autograd.grad(objective_1, x_TD)
        right = float(objective_1.detach())
        free_T = ~made.rows.fixed_RBT[r, 0]
        # A squared distance is as large as the gradients are.
        scale = 1.0 if loss == "cos" else right
        apart = max(apart, abs(float(loss_R[r].detach()) - right) / scale)
        off = (grad_RBTD[r, 0] - grad_TD)[free_T].abs().max() / grad_TD[free_T].abs().max()
        grad_apart = max(grad_apart, float(off))
    descent = Descent(start_RBTD, CONFIG)
    search = Search(
        made.attack(0, loss, observed),
        start_RBTD[0, 0],
        {0: FIRST, start_RBTD.shape[2] - 1: LAST},
        CONFIG.step_size,
        CONFIG.norm_weight,
    )
    plain, ours = in_turns([search.step, lambda: descent.step(loss_of)], repeats, made.device)
    return Line(name, plain, ours / len(start_RBTD), apart, grad_apart)


def moves_(made: Bench, repeats: int, scored: int) -> tuple[list[Line], list[Line]]:
    """Compares the discrete phase of the first victim, in float32 and mixed."""
    exact, mixed = made.only(made.exact), made.only(made.mixed)
    variables_RBTD, attack = made.start_RBTD[:1], made.attack(0, "cos", made.observed)
    places = made.rows.content(0, 0)
    orders = reorderings.sampled(len(places), CONFIG.orders, made.rngs(1)[0])
    order_KT = reorderings.orders_tensor(orders, places, variables_RBTD.shape[2])
    some_KT = order_KT[:scored]
    x_TD = variables_RBTD[0, 0]
    ids_T = attack.nearest(x_TD)

    def plain_scores(orders_KT: Tensor) -> list[float]:
        return scores(attack, made.prior.module, x_TD, ids_T, orders_KT.tolist(), CONFIG.lm_weight)

    def best(objective: Objective) -> Tensor:
        return better_order(optimizer.Search(objective, CONFIG, made.rngs(1)), variables_RBTD)

    tried_RKBTD = x_TD[some_KT][None, :, None]
    lm_penalty_RK = lm_penalty(optimizer.Search(exact, CONFIG, []), 0, ids_T[some_KT][None])
    scores_RK = exact.scores(exact.space.guess(exact.rows, tried_RKBTD)) + lm_penalty_RK
    apart = float((scores_RK[0].cpu() - torch.tensor(plain_scores(some_KT))).abs().max())
    chosen = [best(exact), best(mixed)]
    at = [
        int((x_TD[order_KT] == variables[0, 0]).all(-1).all(-1).nonzero()[0])
        for variables in chosen
    ]
    exact_score, mixed_score = plain_scores(order_KT[at])
    one_by_one, nearest, ours, ours_low = in_turns(
        [
            lambda: plain_scores(some_KT),
            lambda: attack.nearest(x_TD),
            lambda: best(exact),
            lambda: best(mixed),
        ],
        repeats,
        made.device,
    )
    per_order = one_by_one / len(some_KT)
    whole = CONFIG.orders * per_order + nearest
    named = f"moves, {len(order_KT)} distinct"
    return (
        [
            Line(named, whole, ours, apart),
            Line("moves, each", per_order, ours / len(order_KT)),
        ],
        [
            Line(f"{named}, mixed", whole, ours_low, mixed_score - exact_score),
            Line("moves, each, mixed", per_order, ours_low / len(order_KT)),
        ],
    )


def starts(made: Bench, repeats: int) -> tuple[Line, Line]:
    """Compares random starts, in float32 and mixed."""
    rows = len(made.observed)
    few = replace(CONFIG, guesses=max(2, 64 // rows))
    attack = made.attack(0, "cos", made.observed)
    x_TD = made.start_RBTD[0, 0]
    plain, ours, ours_low = in_turns(
        [
            lambda: attack.distance(x_TD, differentiable=False),
            lambda: initial(optimizer.Search(made.exact, few, made.rngs(rows))),
            lambda: initial(optimizer.Search(made.mixed, few, made.rngs(rows))),
        ],
        repeats,
        made.device,
    )
    tried = 2 * few.guesses * rows
    return Line("start", plain, ours / tried), Line("start, mixed", plain, ours_low / tried)


def schedule(name: str, steps: Sequence[Line], moved: Line, start: Line) -> Line:
    """Composes LAMP's schedule of steps, in float32 or first in bfloat16, moves and starts."""
    shares = [1.0] if len(steps) == 1 else [ROUGH, 1 - ROUGH]
    parts = [(share * CONFIG.steps, line) for share, line in zip(shares, steps, strict=True)]
    parts += [(CONFIG.rounds, moved), (2 * CONFIG.guesses, start)]
    return Line(
        name,
        sum(times * line.straightforward for times, line in parts),
        sum(times * line.ours for times, line in parts),
    )


def memory(made: Bench, many: int) -> list[Memory]:
    """Returns the most that tensors take, for each victim."""
    rows, tokens = len(made.observed), made.start_RBTD.shape[2]
    alone = made.only(made.exact)
    attack = made.attack(0, "cos", made.observed)
    search = Search(attack, made.start_RBTD[0, 0], {}, CONFIG.step_size, CONFIG.norm_weight)

    def steps(objective: Objective) -> Callable[[], object]:
        descent = Descent(made.start_RBTD[: len(objective.normalizer_R)], CONFIG)
        loss_of = CONFIG.loss(objective, 1)
        return lambda: descent.step(loss_of)

    def guesses(number: int) -> Callable[[], object]:
        shape = (1, number, 1, tokens)
        ids_RKBT = torch.randint(len(alone.space.table_VD), shape, generator=made.rngs(1)[0])
        ids_RKBT = ids_RKBT.to(made.device)
        choice = optimizer.Search(alone, CONFIG, [])
        return lambda: best_of_batch(choice, ids_RKBT, lm_penalty(choice, 0, ids_RKBT[:, :, 0]))

    def most(do: Callable[[], object]) -> float:
        return peak(do, made.device)

    x_TD = made.start_RBTD[0, 0]
    return [
        Memory("a step, straightforward", most(search.step)),
        Memory("a step, alone", most(steps(alone))),
        Memory(f"a step, {rows} victims", most(steps(made.exact)) / rows),
        Memory(
            "a move, straightforward", most(lambda: attack.distance(x_TD, differentiable=False))
        ),
        *(Memory(f"{number} moves", most(guesses(number))) for number in (64, many)),
    ]


def noised(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Returns gradients with normal noise."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: value
        + NOISE
        * value.norm()
        / value.numel() ** 0.5
        * torch.randn(value.shape, generator=rng).to(value)
        for name, value in tensors.items()
    }


def heading(size: Size) -> str:
    """Returns what is above the rows of a size."""
    return (
        f"\n{f'BERT {size}':<33} {'straightforward':>15} {'ours':>10} {'ratio':>6} "
        f"{'loss':>8} {'gradient':>8}"
    )


def row(line: Line) -> str:
    """Returns a line as text, below `heading`."""
    apart = [
        "-" if difference is None else f"{difference:.0e}"
        for difference in (line.loss, line.gradient)
    ]
    return (
        f"{line.name:<33} {1e3 * line.straightforward:>12,.1f} ms {1e3 * line.ours:>7,.1f} ms "
        f"{line.ratio:>6.1f} {apart[0]:>8} {apart[1]:>8}"
    )


if __name__ == "__main__":
    main()
