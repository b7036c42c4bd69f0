"""Which captures stay once every attack has answered: `[audit] keep`."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

from fedleak.attacks.reconstruction import Status
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.store.records import Answer
from fedleak.store.run import Key, Run
from fedleak.store.shards import shares
from fedleak.util.errors import CaptureError


class Retention:
    """Deletes captures that nobody needs any more.

    The server needs none of them: it sums updates as they come. A capture on which an attack failed
    stays, so that the attack can be tried again. A capture waits for the attacks of this
    experiment, of the experiment that the run was prepared with, and of all shards, so that no
    attack comes too late because another one was quicker.

    Args:
        run: The run directory.
        experiment: The experiment whose attacks run now.
    """

    def __init__(self, run: Run, experiment: Experiment) -> None:
        self._run, self._keep = run, experiment.audit.keep
        if self._keep == "all":
            return
        shard_attacks = (share.attacks for share in shares(run).values() if share is not None)
        attacks = (*experiment.attacks, *stored(run).attacks)
        names = {*(named.name for named in attacks), *chain.from_iterable(shard_attacks)}
        self._left: dict[Key, set[str]] = defaultdict(names.copy)
        self._failed: set[Key] = set()
        self._proved: set[Key] = set()

    def answered(self, answers: Iterable[Answer]) -> None:
        """Notes answers, and deletes captures for which all have come.

        A process that was killed may have left captures that were answered: they are deleted when
        their answers are noted.
        """
        if self._keep == "all":
            return
        for answer in answers:
            self._left[answer.key].discard(answer.attack)
            if answer.status == Status.FAILED:
                self._failed.add(answer.key)
            if answer.verified:
                self._proved.add(answer.key)
            self.arrived(answer.key)

    def arrived(self, key: Key) -> None:
        """Notes that a capture is here; all of its answers may have come before."""
        if self._keep == "all" or key not in self._left or self._left[key]:
            return
        wanted = self._keep == "unproved" and key not in self._proved
        if self._run.captures.has(key):
            # Attacks on a damaged capture have failed, so there is nothing to delete.
            with suppress(CaptureError):
                self._run.captures.close(key, delete=not wanted and key not in self._failed)
