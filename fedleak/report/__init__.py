"""Tables and drawings of what was scored."""
