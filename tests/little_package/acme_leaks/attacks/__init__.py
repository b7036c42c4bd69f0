"""A package of attacks: fedleak looks into each of its modules."""
