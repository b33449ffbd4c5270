"""What processes tell each other, and weights wherever they lie.

A run of one process is a group of one. Everything that crosses between ranks goes through the
group: sums, comparisons, the noise key, parts of weights. Signals that end a run are caught here.
"""
