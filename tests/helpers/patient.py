"""An attack of several observations at once, in a module that a worker process can import."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedleak.attacks import Progress
from fedleak.attacks.reconstruction import Reconstruction, Status


@dataclass(frozen=True)
class Patient:
    """Draws its answers, takes its time, and writes down whom it was given.

    Attributes:
        log: A file with a line for each call: rounds and clients.
        at_once: As of every such attack.
        steps, pause: How long it takes.
        poison: A client whose update it cannot bear.
    """

    kind: ClassVar[str] = "patient"
    uses: ClassVar[frozenset[str]] = frozenset()
    log: str
    at_once: int = 2
    steps: int = 1
    pause: float = 0.0
    poison: int | None = None

    def obstacle(self, setting):
        return None

    def __call__(self, seen, model, *, rng):
        (answer,) = self.many([seen], model, rngs=[rng], report=lambda which, progress: None)
        return answer

    def many(self, seen, model, *, rngs, report):
        with Path(self.log).open("a") as file:
            print(
                json.dumps([(observation.round, observation.client) for observation in seen]),
                file=file,
            )
        if self.poison in [observation.client for observation in seen]:
            raise RuntimeError("poisoned")
        for step in range(self.steps):
            time.sleep(self.pause)
            for which, observation in enumerate(seen):
                report(which, Progress(step + 1, self.steps, 0.5, f"text {observation.client}"))
        return [self._answer(observation, rng) for observation, rng in zip(seen, rngs, strict=True)]

    def _answer(self, seen, rng):
        drawn = rng.initial_seed() % 1000
        size = sum(float(t.double().norm()) for t in seen.update.tensors.values())
        return Reconstruction(
            status=Status.RECOVERED, sequences=((drawn,),), evidence=(size,), tokens=(drawn,)
        )
