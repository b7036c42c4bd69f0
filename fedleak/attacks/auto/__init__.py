"""The strongest attack that a setting admits, made of the others: one file per part.

`attack` has the attack itself, `reading` asks the others, `peeling` takes what is proved out of an
update, and `evidence` chooses among what several attacks read.
"""
