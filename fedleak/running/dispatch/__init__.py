"""Which capture goes to which attack when, and what becomes of the answers."""
