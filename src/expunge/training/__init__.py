"""Batches, losses, SGD and evaluation: all that is not certified by itself.

Training before a request and fine-tuning after the noise are post-processing of what they are given
and of retained data; what certifies is in ``noisy``.
"""
