"""Models built to forget: heads on public integer features, and ensembles of shards.

``features`` and ``integers`` turn an example into whole numbers, ``store`` keeps them so that its
bytes tell nothing of what was removed, ``sums`` adds them exactly; ``statistics`` and ``convex``
are the two heads (THEORY, sections 10 and 11). ``shards`` trains any network in parts that never
see each other's data (section 12).
"""
