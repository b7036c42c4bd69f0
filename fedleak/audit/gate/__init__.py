"""May this run pass? Compares its worst case with limits; checks that enough was measured.

The upper end of the interval is compared with a limit, never the mean. A limit holds only if the
attacks were free to work: an attack that failed, was cut short or abstained is no evidence that
nothing can be read.

The gate does not trust what scoring wrote: `evidence` scores the answers again, `limits` compares
the new figures with the limits, `measured` checks whether enough was measured, and `judge` puts
these checks together.
"""
