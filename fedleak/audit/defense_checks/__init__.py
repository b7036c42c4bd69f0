"""Does each defense do what it says? Tested on the update as a client would send it.

Published results were wrong in ways that nobody tested: noise was measured before it was added, the
batch's mean was clipped and not each example, a budget began anew in every round
(docs/how-a-number-can-lie.md). Every run with defenses is checked before it trains, and
`fedleak check-defense` prints the figures.

The checks feed texts of random tokens to the experiment's own model, and never a client's data:
`bench` makes the updates, and the other modules test them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from fedleak.audit.defense_checks.bench import EXAMPLES, Bench, Test, random_texts, trained_on
from fedleak.audit.defense_checks.combined_updates import combines
from fedleak.audit.defense_checks.privacy import counts, guarantees, measured
from fedleak.audit.defense_checks.sampling import draws
from fedleak.audit.defense_checks.sent_update import changes, keeps
from fedleak.config.checks import check_defenses
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import client_sizes
from fedleak.config.federation.protection import protection
from fedleak.config.federation.workload import divide, read_data
from fedleak.config.sent_parameters import selected_parameters
from fedleak.defenses import TrustedAggregator
from fedleak.models import LanguageModel, loading
from fedleak.models.parameter_selection import select
from fedleak.store.run import Run
from fedleak.training.aggregation import WeightedSum, aggregate
from fedleak.training.observation import UpdateKind
from fedleak.training.steps import Batch
from fedleak.training.wire import partial_update
from fedleak.util.errors import FedleakError
from fedleak.util.finite import all_finite
from fedleak.util.rng import stream


@dataclass(frozen=True)
class Finding:
    """One claim of a defense, put to the test.

    Attributes:
        defense: Its place in the file and its kind; or what else was tested.
        claim: What should hold.
        holds: Whether it holds.
        figures: What was measured; its key in checks.json is "found".
    """

    defense: str
    claim: str
    holds: bool
    figures: Annotated[str, Field(alias="found")]


FINDINGS = TypeAdapter(list[Finding])
"""The content of checks.json."""


def refuse_broken(
    run: Run, experiment: Experiment, findings: Sequence[Finding] | None = None
) -> None:
    """Checks the defenses of a run that has not begun, and notes the findings in checks.json.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        findings: The findings of a check that was made just before; None: the check is made now.

    Raises:
        FedleakError: A defense does not do what it says.
    """
    if not experiment.defense or run.captures.all_keys():
        return
    if findings is None:
        findings = check(experiment, client_sizes(run))
    run.write_json("checks.json", FINDINGS.dump_python([*findings], by_alias=True))
    broken = [
        f"{finding.defense}: {finding.claim}: {finding.figures}"
        for finding in findings
        if not finding.holds
    ]
    if broken:
        raise FedleakError(
            f"a defense fails its check ({'; '.join(broken)}): nothing was trained; see "
            f"`fedleak check-defense` and {run.path / 'checks.json'}"
        )


def check(experiment: Experiment, sizes: Sequence[int] | None = None) -> list[Finding]:
    """Tests every claim of every defense, and the update with all defenses together.

    Args:
        experiment: The experiment.
        sizes: How many examples each client has, if the data is on nodes; None: not known yet, so
            each client has one batch.

    Raises:
        ConfigError: The experiment cannot work.
    """
    torch.set_num_threads(1)  # as in training; several wait for each other if other programs run
    split = read_data(experiment)
    model = loading.load(experiment.model_spec(len(split.train.label_names)))
    check_defenses(experiment, model)
    divided = [len(part) for part in divide(experiment, split, model).parts]
    if not experiment.data.on_nodes:
        sizes = divided
    elif sizes is None:
        sizes = [experiment.federation.batch_size] * experiment.federation.clients
    model = replace(model, response_template=())  # in random words there is no response
    texts, findings = random_texts(model, experiment.seed), []
    for number, placed in enumerate(experiment.defenses):
        client = placed.clients[0] if placed.clients else 0
        of_client = protection(experiment, client, sizes[client])
        bench = Bench(
            model=model,
            texts=texts,
            plain=replace(
                experiment.local_training,
                kind=UpdateKind.GRADIENT,  # FedAvg takes one step: its noise is what was added
                batch_size=min(experiment.federation.batch_size, of_client.num_examples),
                dropout=False,
            ),
            defense=of_client.defenses[number],
            num_examples=of_client.num_examples,
            seed=experiment.seed,
            sends=experiment.local_training.kind,
        )
        tests = chain(
            combines(bench) if isinstance(bench.defense, TrustedAggregator) else changes(bench),
            keeps(bench),
            draws(bench),
            counts(bench),
            guarantees(bench),
            measured(bench, experiment, client),
        )
        findings += [Finding(f"defense[{number}] ({placed.part.kind})", *test) for test in tests]
    together = _all_together(experiment, model, texts, sizes[0])
    return findings + [Finding("the update", *test) for test in together]


def _all_together(
    experiment: Experiment, model: LanguageModel, texts: Batch, num_examples: int
) -> Iterator[Test]:
    """Tests the first client's update with all of its defenses, and how it moves the weights."""
    of_client = protection(experiment, 0, num_examples)
    # A batch of all examples, so that FedAvg makes one step.
    local = replace(of_client.local, batch_size=EXAMPLES, epochs=1)
    before = model.parameters()
    update = trained_on(model, texts, local, seed=experiment.seed)
    update, _ = of_client.defend(update, lambda n: stream(experiment.seed, "check", n))
    sent = partial_update(update, selected_parameters(experiment, model))
    frozen = set(select(model, local.frozen, "parameters")) if local.frozen else set()
    wanted = set(selected_parameters(experiment, model)) - frozen
    yield (
        "what is shared and trained is sent, and nothing else",
        sent.tensors.keys() == wanted,
        f"{len(sent.tensors)} of {len(before)} tensors",
    )
    total = WeightedSum(lambda name: before[name].dtype)
    total.add_(sent)
    after, _ = aggregate(before, total, experiment.server_optimiser, {})
    moved = sum(not torch.equal(after[name], before[name]) for name in before)
    yield (
        "the global weights move, and stay finite",
        moved > 0 and all(map(all_finite, after.values())),
        f"{moved} of {len(before)} tensors move",
    )
