"""Flower's example FlowerTune, tapped: the words of an experiment say all that its Trainer does."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import flowertune

from fedleak.attacks import replay
from fedleak.audit.vault import read_truth
from fedleak.config.federation.lookup import stored
from fedleak.models import builtin, load_parameters_, loading
from fedleak.tap.about import load_about
from fedleak.tap.folder import Tapped
from fedleak.tap.importing import import_run
from fedleak.training.observation import Observation

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_steps_of_its_trainer_are_made_again(tmp_path):
    """Without dropout, which nobody can make again; the Trainer clips, and decays nothing."""
    changes = {"model.lora.dropout": 0.0, "bf16": False, "model.lora.peft-lora-r": 4}
    changes |= {"texts": 4, "batch-size": 2, "max-steps": 2, "strategy.fraction-train": 1.0}
    changes |= {"model.name": str(builtin.folder("llama-tiny"))}
    about = load_about(flowertune.tapped(tmp_path, 1, **changes))
    whole = about.model.model_copy(update={"response_template": ""})
    for variant, verified in ((about, True), (about.model_copy(update={"model": whole}), False)):
        run = import_run(Tapped(tmp_path / "tap"), variant, tmp_path / f"run-{verified}").run
        (key,) = run.captures.all_keys()
        model = loading.load(stored(run).model_spec(2))
        load_parameters_(model, run.models.read_model(1))
        capture, truth = run.captures.read_capture(key), read_truth(run, key)
        seen = Observation(
            round=1, client=key.client, update=capture.update, knowledge=capture.knowledge
        )
        assert len(truth.sequences) == 4
        assert replay.replay(model, truth.sequences, seen).verified is verified
    assert len(run.read_json("held_out.json")["sequences"]) == flowertune.HELD_OUT
