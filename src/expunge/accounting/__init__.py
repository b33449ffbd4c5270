"""From a recipe to (ε, δ) and back.

Pure functions on numbers: the exact Gaussian trade-off, one function per theorem, what finite
precision adds, the free parameter that just meets a target, and a plan before anybody trains.
Needs numpy and scipy, never torch; every number errs to the side that promises less.
"""
