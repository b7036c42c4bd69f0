"""The tables of a run's figures, in the sections of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedleak.report.table import Table
from fedleak.report.tables.attacks import attack_table
from fedleak.report.tables.canaries import canary_table
from fedleak.report.tables.defenses import defense_tables
from fedleak.report.tables.detections import detections_table
from fedleak.report.tables.ladder import ladder_table
from fedleak.report.tables.membership import membership_tables
from fedleak.report.tables.personal_data import personal_data_tables
from fedleak.report.tables.published import published_table
from fedleak.store.summaries import RunSummary


def run_tables(
    summary: RunSummary, defenses: Sequence[Mapping[str, Any]]
) -> dict[str, list[Table]]:
    """Returns the tables of what was measured by section; a section may be empty.

    Args:
        summary: The figures.
        defenses: As in the experiment file.
    """
    attacks = [attack_table(summary), *personal_data_tables(summary)]
    return {
        "attacks": attacks if summary.attacks else [],
        "ladder": [ladder_table(summary, summary.ladder)] if summary.ladder else [],
        "defenses": defense_tables(defenses, summary.defended),
        "canaries": [canary_table(summary.canary)] if summary.canary else [],
        "membership": membership_tables(summary.membership) if summary.membership else [],
        "published": [published_table(summary.published)] if summary.published else [],
        "detections": [detections_table(summary.detections)] if summary.detections else [],
    }
