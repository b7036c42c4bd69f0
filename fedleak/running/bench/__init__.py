"""Fixed suites of settings on which attacks are compared: every attack, every setting, one score.

A suite is a file with a version. Its seeds fix what clients send, and every answer is scored as in
any run. Results of one suite and version can stand in one table.
"""
