"""The strongest attack that a setting admits, made of the others: one file per part.

`attack` has the attack itself and runs the others, `budget` shares its time, `peeling` takes what
is proved out of an update, `sharpening` mends guesses word by word, `evidence` chooses among what
several attacks read, and `chance` tells what an answer without a proof is worth.
"""
