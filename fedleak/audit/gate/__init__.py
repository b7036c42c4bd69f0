"""May this run pass? Its worst case against limits, and whether enough was measured to tell.

What is compared with a limit is the upper end of the interval, never the mean. A limit holds only
where the attacks were free to work: an attack that crashed, was cut short or found nothing that it
stands by is no evidence that nothing can be read.

Nothing that scoring wrote is believed: `evidence` scores the answers again, `limits` compares what
they give with the limits, `measured` asks whether enough was measured, and `judge` puts these
checks together.
"""
