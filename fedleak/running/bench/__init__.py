"""Fixed suites of settings on which attacks are compared: every attack, every setting, one score.

A suite is a file with a version. What it makes clients send is fixed by its seeds, and every answer
is scored as any run's is. Results of one suite and version can stand in one table.
"""
