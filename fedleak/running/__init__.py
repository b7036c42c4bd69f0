"""From an experiment to its results: one run, a sweep, a benchmark."""
