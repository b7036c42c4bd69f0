"""The run directory: the only thing that training, attacks and scoring share."""
