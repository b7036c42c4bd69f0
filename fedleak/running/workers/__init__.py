"""Where attacks run: processes apart from training and from the truth."""
