"""One command from an experiment, a tap or a run to a decision: `fedleak audit`.

`rehearsal` measures how long one client's update takes, `plan` says from that what fits into the
time, and `begin` opens the run and goes on with one that was stopped.
"""
