"""Attacks on the row space of attention gradients: the inputs of a batch span it."""
