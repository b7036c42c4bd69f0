"""What an experiment decides before training: who holds which data, trains when, and how."""
