"""Small things of no room: errors, files and processes, names, randomness."""
