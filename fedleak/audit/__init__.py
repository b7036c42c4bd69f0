"""Scores attacks' answers against the truth; tests defenses; measures utility and privacy."""
