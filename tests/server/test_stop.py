"""Training that is to stop, in the engine that is another process."""

import sys
from types import SimpleNamespace

import pytest

from fedleak.flower import simulation
from fedleak.util.errors import StoppedError

KEEPER = """#!/bin/sh
cat > /dev/null  # until the pipe is closed
echo ended > "$4/ended"
exit 1
"""


def test_the_simulation_is_ended_once_it_is_to_stop(tmp_path, monkeypatch):
    keeper = tmp_path / "keeper"
    keeper.write_text(KEEPER)
    keeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(keeper))
    calls = []

    def stop():
        calls.append(True)
        return len(calls) == 3

    run = SimpleNamespace(path=tmp_path)
    experiment = SimpleNamespace(federation=SimpleNamespace(clients=2, at_once=None))
    with pytest.raises(StoppedError, match="training was stopped"):
        simulation.train(run, experiment, stop)
    assert len(calls) == 3
    assert (tmp_path / "ended").is_file()
