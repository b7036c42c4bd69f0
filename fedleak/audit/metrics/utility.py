"""How good the global model is on examples that no client has."""

import math
from collections.abc import Sequence

import torch

from fedleak.models import CLASSIFICATION, LanguageModel, batch_loss, pad, target_counts

BATCH = 16


@torch.no_grad()
def evaluate(
    model: LanguageModel, sequences: Sequence[Sequence[int]], labels: Sequence[int]
) -> dict[str, float]:
    """Returns the mean loss and the figures of the task.

    A classifier has accuracy, F1 (macro above two classes) and MCC; a causal model has perplexity,
    over all target tokens alike.
    """
    model.module.eval()
    losses, counts, predicted = [], [], []
    for start in range(0, len(sequences), BATCH):
        batch = sequences[start : start + BATCH]
        ids_BT, mask_BT = pad(batch, model.tokenizer.pad_token_id, model.device)
        labels_B = torch.tensor(labels[start : start + BATCH], device=model.device)
        loss = batch_loss(model, ids_BT, mask_BT, labels_B)
        counts.append(sum(target_counts(model, batch)))
        losses.append(float(loss) * counts[-1])
        if model.task == CLASSIFICATION:
            logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
            predicted += logits_BC.argmax(-1).tolist()
    scores = {"loss": math.fsum(losses) / sum(counts)}
    if model.task != CLASSIFICATION:
        # A loss of hundreds has a perplexity that no float holds.
        scores["perplexity"] = math.exp(scores["loss"]) if scores["loss"] < 700 else math.inf
    else:
        # Here, because it takes a second.
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        average = "binary" if model.num_labels == 2 else "macro"
        # If all have one class, sklearn returns 0 too, and warns.
        several = len({*labels, *predicted}) > 1
        scores |= {
            "accuracy": float(accuracy_score(labels, predicted)),
            "f1": float(f1_score(labels, predicted, average=average, zero_division=0.0)),
            "mcc": float(matthews_corrcoef(labels, predicted)) if several else 0.0,
        }
    return scores
