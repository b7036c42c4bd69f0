"""Puts the checks of the gate together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedleak import attacks
from fedleak.audit.gate.check import Check, untold
from fedleak.audit.gate.control import control_checks, with_abstentions
from fedleak.audit.gate.evidence import complete, figures, gather, genuine, own
from fedleak.audit.gate.limits import LEAKS, MEMBERSHIP, limit_checks
from fedleak.audit.gate.measured import measured_checks, required_checks
from fedleak.config import checks
from fedleak.config.tables import LEAST, MOST, GateTable
from fedleak.store.run import Run
from fedleak.store.summaries import PositiveControl
from fedleak.util.errors import ConfigError, FedleakError


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes:
        checks: Checks of limits, and of what has to be measured before limits mean anything.
        digest: A mark of the limits and of the figures that they were compared with; None: there
            are no figures.
    """

    checks: Sequence[Check]
    digest: str | None


def judge(
    run: Run,
    limits: GateTable,
    *,
    accept_purged: bool = False,
    control: PositiveControl | None = None,
) -> Verdict:
    """Scores a run anew, writes nothing, and compares it with limits.

    Args:
        run: The run directory.
        limits: At least one limit, or something that has to be measured.
        accept_purged: Accept the figures of a run as they are if its private data was deleted.
        control: What the same attacks read of undefended copies; None: the run's positive control.

    Raises:
        ConfigError: This is no run directory, there is no limit, or a name is no attack's.
    """
    run.info()  # refuses a folder that is no run
    wanted = chosen(limits)
    if not wanted:
        raise ConfigError(
            "there is no limit: give --set gate.exact=0.01, for example, or a [gate] in the "
            f"experiment file (limits: {', '.join([*MOST, *LEAST])})"
        )
    try:
        evidence = gather(run)
    except ConfigError:
        raise
    except FedleakError as error:
        return Verdict([untold("figures", [str(error)])], None)
    names = {*evidence.kinds, *(row.attack for row in evidence.rows.leakage)}
    checks.check_gate(limits, names, {*evidence.kinds.values(), *attacks.kinds()})
    counted = with_abstentions(evidence, limits.may_abstain, control)
    gate_checks = [
        *limit_checks(limits, counted),
        *required_checks(limits, counted),
        figures(evidence, accept_purged=accept_purged),
        genuine(evidence),
        own(evidence),
        complete(evidence),
    ]
    if wanted.keys() & {*LEAKS, *MEMBERSHIP, "coverage"}:
        gate_checks += measured_checks(limits, counted, wanted.keys() & LEAKS.keys())
    if leaks := {name: getattr(limits, name) for name in LEAKS if name in wanted}:
        gate_checks += control_checks(leaks, counted)
    return Verdict(gate_checks, evidence.digest(limits.model_dump(mode="json")))


def chosen(limits: GateTable) -> Mapping[str, object]:
    """Returns what is limited or required, without `seconds`, which limits nothing by itself."""
    names = [*MOST, *LEAST, "require"]
    table = {name: getattr(limits, name) for name in names if name != "seconds"}
    return {name: value for name, value in table.items() if value not in (None, [])}


def described(limits: GateTable, of_run: GateTable) -> str:
    """Returns in one line the settings that decide, and where each comes from.

    Args:
        limits: What the run is compared with.
        of_run: The gate of its experiment.
    """
    named = {**chosen(limits), "seconds": limits.seconds, "may_abstain": limits.may_abstain}
    return "; ".join(
        f"{name} {', '.join(value) or 'none' if isinstance(value, list) else value} "
        f"({'[gate] of run.json' if value == getattr(of_run, name) else 'command line'})"
        for name, value in named.items()
    )
