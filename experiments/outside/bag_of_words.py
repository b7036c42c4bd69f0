# bag_of_words.py
import json
import sys
from pathlib import Path

from safetensors.numpy import load_file

folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
seen = json.loads((folder / "observation.json").read_text())
update = load_file(folder / "update.safetensors")

# A token that is not in the batch has no gradient at its word embedding.
rows = update.get(seen["model"]["word_embedding"], [])
used = [token for token, row in enumerate(rows) if row.any()]

found = {"format": "fedleak-answer", "version": 1, "status": "recovered", "tokens": used}
if not used or len(used) == len(rows):
    found = {"format": "fedleak-answer", "version": 1, "status": "abstained"}
    found["reason"] = "no row of the word embedding stands out"
answer.write_text(json.dumps(found))
