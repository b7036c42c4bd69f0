"""The words that a report explains, inside the report itself."""

from fedleak.report.html.page import Entry

TERMS = (
    Entry("update", "What one client sends in one round: a gradient or a change of the weights."),
    Entry("round", "One broadcast of the model, and the updates that answer it."),
    Entry("batch", "The private texts that one update was computed from."),
    Entry("word for word", "All tokens of a text are right and in order."),
    Entry("token", "A word or a part of a word, as the model reads text."),
    Entry(
        "tokens found",
        "The share of a batch's distinct tokens that an attack names, in any order.",
    ),
    Entry(
        "ROUGE-L",
        "How much of a text was read in order, from 0 to 100, by the longest common subsequence "
        "of words.",
    ),
    Entry(
        "other update",
        "A control: the same attack's answer for another client, scored against this client's "
        "texts. A score means leakage only as far as it exceeds it.",
    ),
    Entry(
        "no update",
        "A control: the score of held-out texts that were drawn without looking at any update.",
    ),
    Entry(
        "interval",
        "Where the figure lies for other clients like these, with 95 % confidence. A client "
        "counts once, however many texts it has.",
    ),
    Entry(
        "proved",
        "The recomputed gradient of the answer equals what the client sent, up to one factor on "
        "all of it: the whole batch is right, and the attacker knows it.",
    ),
    Entry(
        "margin",
        "How many times worse the best rejected answer is, by the attack's own evidence. "
        "Below 1: a guess.",
    ),
    Entry(
        "answers",
        "An attack may abstain, be inadmissible in a setting, or fail. Then it has no answer, "
        "which says nothing about other attacks.",
    ),
    Entry("granted", "Told to the attacker beyond what the protocol tells the server."),
    Entry("utility", "How good the trained model is on held-out texts."),
    Entry(
        "epsilon",
        "The parameter of a differential privacy guarantee: smaller means more private. "
        "None: nothing is guaranteed.",
    ),
    Entry(
        "membership",
        "Whether a text, which the attacker has already, was in the batch of an update. It can "
        "often be told where no text can be read any more.",
    ),
    Entry(
        "canary",
        "A made-up gradient that an audit puts into an update by the flip of a coin. How well the "
        "server guesses the coins bounds epsilon from below.",
    ),
    Entry(
        "secret",
        "A made-up text that an audit plants in a client's data. Twins are made in the same way, "
        "and nobody trains on them.",
    ),
    Entry("published model", "The global model after a round, which all participants get."),
    Entry("ledger", "Each client's epsilon over all its rounds so far."),
)
"""In the order of a report."""
