"""What attacks answered against what clients held; what defenses and training are worth."""
