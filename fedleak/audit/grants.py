"""The facts about a client's batch that an attacker is granted beyond the protocol."""

from fedleak.audit.kept_texts import KeptTexts, read_held_out
from fedleak.audit.privacy.candidates import questions
from fedleak.audit.vault import read_truth
from fedleak.config.federation.lookup import stored
from fedleak.store.run import Key, Run
from fedleak.training.observation import QUESTIONS, Knowledge, ThreatModel
from fedleak.util.errors import FedleakError


def knowledge(
    run: Run, key: Key, threat: ThreatModel, from_file: KeptTexts | None = None
) -> Knowledge:
    """Returns what the attacker knows of a capture: the server's facts and the granted ones.

    Args:
        run: The run directory.
        key: Which capture.
        threat: What is granted.
        from_file: Texts that an attack on membership is asked about; None: the audit chooses them.

    Raises:
        FedleakError: A private fact is granted but the client wrote no truth, or there are no
            held-out texts for a question.
        CaptureError: The capture or the truth is damaged.
    """
    server = run.captures.about(key).knowledge
    if not threat.knows:
        return server
    truth = read_truth(run, key)
    if truth is None:
        raise FedleakError(
            f"[threat] grants {', '.join(sorted(threat.knows))}, but the vault has no {key}: "
            f"run with the vault on, take it from a node with `fedleak score {run.path} --vault "
            "FOLDER`, or grant nothing"
        )
    longest_first = sorted(
        range(len(truth.sequences)), key=lambda i: len(truth.sequences[i]), reverse=True
    )
    candidates = None
    if threat.knows & QUESTIONS:
        experiment = stored(run)
        clients = experiment.federation.clients
        candidates = questions(truth, read_held_out(run), experiment.seed, clients, from_file).asked
    private = Knowledge(
        batch_size=truth.batch_size,
        lengths=tuple(len(truth.sequences[i]) for i in longest_first),
        labels=tuple(truth.labels[i] for i in longest_first) if truth.labels else None,
        noise_scale=truth.noise_scale,
        candidates=candidates,
    )
    return threat.grant(server, private)
