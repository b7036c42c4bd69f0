"""What the server sends with every message, so that nodes need no file of the experiment."""

from flwr.app import ConfigRecord

from fedleak.config.experiment import Experiment
from fedleak.federation.assignment import Assignment
from fedleak.store.run import Run


def assignment(experiment: Experiment, run: Run) -> ConfigRecord:
    """Returns the record that tells a node what is trained."""
    classes = run.info().get("classes", []) if experiment.data.on_nodes else []
    values = Assignment(experiment, run.path.name, tuple(classes)).to_values()
    return ConfigRecord(dict(values))
