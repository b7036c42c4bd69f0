"""Was this text in the update? It has an answer even if no text can be read."""
