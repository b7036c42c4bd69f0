"""Rows of leakage.jsonl that no attack made."""

from typing import Any

from fedleak.attacks.reconstruction import Status
from fedleak.store.records import LeakageRow, TextScore

NOTHING = dict.fromkeys(
    [
        name
        for name in LeakageRow.model_fields
        if name not in ("facts", "diagnostics", "knows", "granted", "personal", "apart")
    ]
)


def row(
    attack: str, client: int, *texts: tuple[Any, ...], round: int = 1, **more: Any
) -> LeakageRow:
    """Returns a row of an attack; a text is (exact, ROUGE-L, token recall)."""
    scores = tuple(TextScore(exact=e, rougeL=r, token_recall=t) for e, r, t in texts)
    about: dict[str, Any] = {
        "round": round,
        "client": client,
        "attack": attack,
        "status": Status.RECOVERED,
        "reason": "",
        "verified": False,
        "batch_size": len(texts),
        "num_tokens": 9,
        "texts": scores,
        "facts": {},
        "diagnostics": {},
        "knows": (),
    }
    return LeakageRow(**(NOTHING | about | more))
