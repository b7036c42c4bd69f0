"""Parts of `gpu`: constants of gradient matching that were guesses for GPUs, beside other values.

The same step of LAMP (matched by cosine, embedding norms included), taken with each value. Medians,
in turns, in one run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch
from clocks import in_turns
from gpu_figures import Figure, Settings, Value
from gradient_matching import CONFIG, Bench, bench, size_of
from torch import Tensor

from fedleak.attacks.matching import gradient_distance, victims
from fedleak.attacks.matching.factored_gradients import tables
from fedleak.attacks.matching.gradient_distance import target_of
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import Descent

LENGTHS = (6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48)
"""Tokens of the victims that are put together."""

PASSES = (0, 32, 128, 512, 1024, 2048, 4096, 16384)
"""Values of PASS."""

BATCHES = ((1, 8), (1, 16), (4, 16), (8, 16), (16, 32), (32, 32), (64, 64), (128, 64))
"""Victims, and tokens of each, with weights looked at together and one by one."""


def passes(settings: Settings) -> Iterator[Figure]:
    """Times a step of victims of several lengths, in the batches that each value puts them in."""
    lengths = LENGTHS[:3] if settings.small else LENGTHS
    for made, size in _benches(settings, lengths):
        present = victims.PASS[made.device.type]
        sizes = {i: victims.Size(length, 1, 1) for i, length in enumerate(lengths)}
        parts_of = {
            value: victims.parts(range(len(lengths)), sizes, value)
            for value in sorted({*PASSES, present})
        }
        # Values that come to the same batches are timed once.
        distinct = list({str(parts): parts for parts in parts_of.values()}.values())
        with made.exact.batch_gradients.ready():
            steps = [[_step(*_some(made, part)) for part in parts] for parts in distinct]
            seconds = dict(
                zip(
                    map(str, distinct),
                    in_turns(
                        [_all(part_steps) for part_steps in steps], _repeats(settings), made.device
                    ),
                    strict=True,
                )
            )
        taken = {value: seconds[str(parts)] for value, parts in parts_of.items()}
        size = f"{size}, {len(lengths)} victims of {lengths[0]} to {lengths[-1]} tokens"
        batches: dict[int, dict[str, Value]] = {
            value: {"batches": len(parts)} for value, parts in parts_of.items()
        }
        yield from _compared("PASS", size, taken, present, batches)


def together(settings: Settings) -> Iterator[Figure]:
    """Times a step with all weights of a shape looked at together, and with one at a time."""
    batches = BATCHES[:2] if settings.small else BATCHES
    lengths = sorted({tokens for _, tokens in batches})
    for made, size in _benches(settings, lengths):
        present = gradient_distance.TOGETHER[made.device.type]
        joint: dict[int, float] = {}
        apart: dict[int, float] = {}
        for number_of_victims, tokens in batches:
            number, alike = number_of_victims * tokens, [lengths.index(tokens)] * number_of_victims
            with made.exact.batch_gradients.ready():
                do = _step(*_some(made, alike))
                joint[number], apart[number] = in_turns(
                    [_with(made.device, number, do), _with(made.device, 0, do)],
                    _repeats(settings),
                    made.device,
                )
            of_batch = f"{size}, {number_of_victims} victims of {tokens} tokens"
            yield Figure("weights together", of_batch, joint[number], "one by one", apart[number])
        taken = {
            value: sum(joint[n] if n <= value else apart[n] for n in joint)
            for value in sorted({0, *joint, present})
        }
        yield from _compared("TOGETHER", f"{size}, sum of those", taken, present, {})


def _compared(
    name: str,
    size: str,
    taken: dict[int, float],
    present: int,
    more: dict[int, dict[str, Value]],
) -> Iterator[Figure]:
    """Yields each value beside the present one."""
    fastest_seconds = min(taken.values())
    for value, seconds in taken.items():
        flags = {"fastest": seconds == fastest_seconds, "present": value == present}
        yield Figure(
            f"{name} = {value}",
            size,
            seconds,
            f"{name} = {present}",
            taken[present],
            more.get(value, {}) | flags,
        )


def _benches(settings: Settings, lengths: Sequence[int]) -> Iterator[tuple[Bench, str]]:
    """Yields victims of these lengths for each size of model."""
    vocabulary = 200 if settings.small else 30522
    for size in ["2x64"] if settings.small else ["6x384", "12x768"]:
        made = bench(
            size_of(size),
            max(lengths),
            len(lengths),
            vocabulary,
            settings.seed,
            device=torch.device(settings.device),
            lengths=lengths,
        )
        yield made, size


def _some(made: Bench, chosen: Sequence[int]) -> tuple[Objective, Tensor]:
    """Returns some victims by themselves, padded to the longest of them, and where they begin.

    One may be among them several times.
    """
    index = torch.tensor(chosen, device=made.device)
    rows = made.exact.rows.take(index).sequences_of([0])
    distinct = sorted(set(chosen))
    target = target_of([made.observed[i] for i in distinct], rows.length, tables(made.model))
    places = torch.tensor([distinct.index(i) for i in chosen], device=made.device)
    objective = replace(made.exact.take(index), target=target.take(places), rows=rows)
    return objective, made.start_RBTD[index, :, : rows.length]


def _step(objective: Objective, start_RBTD: Tensor) -> Callable[[], object]:
    """Returns a step of Adam, which goes on from where the last one ended."""
    descent, loss_of = Descent(start_RBTD, CONFIG), CONFIG.loss(objective, 1)
    return lambda: descent.step(loss_of)


def _all(steps: Sequence[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [step() for step in steps]


def _with(device: torch.device, value: int, do: Callable[[], object]) -> Callable[[], object]:
    """Returns the same with another value of `TOGETHER`."""

    def changed() -> None:
        with mock.patch.dict(gradient_distance.TOGETHER, {device.type: value}):
            do()

    return changed


def _repeats(settings: Settings) -> int:
    return 1 if settings.small else 9
