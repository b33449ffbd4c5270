"""The noisy loop of the paper: from a trained module to a certified one.

What of a module is certified and what is public; the vector of certified parameters on its grid;
the exact noise; clips, steps and checkpoints; and the record of what ran.
"""
