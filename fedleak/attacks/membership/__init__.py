"""Was this text in the update? It has an answer where no text can be read any more."""
