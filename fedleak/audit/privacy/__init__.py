"""How private a run is: canaries, membership, bounds, and the ledger of epsilon."""
