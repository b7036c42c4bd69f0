"""Attacks that are programs of others: they get files, and answer with a file."""
