"""One command from an experiment, a tap or a run to a decision: `fedleak audit`.

`rehearsal` measures how long one client's update takes, `plan` computes from that what fits into
the time, and `begin` opens the run, or goes on with a run that was stopped.
"""
