"""Models built to forget: public integer features, a store without a past, and heads on top.

``features`` and ``integers`` turn an example into whole numbers, ``store`` keeps them so that its
bytes tell nothing of what was removed, ``sums`` adds them exactly; ``statistics`` and ``convex``
are the two heads (THEORY, sections 10 and 11).
"""
