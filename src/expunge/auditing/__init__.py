"""Attacks on the engine and on released models, and what they prove.

Worst-case pairs are run through the engine itself, many trials at a time, and how often a test
tells them apart gives a lower bound on ε with confidence; membership inference does so for models.
"""
