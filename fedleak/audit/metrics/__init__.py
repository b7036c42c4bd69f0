"""How an answer compares with the truth. Nothing here is visible to an attack."""
