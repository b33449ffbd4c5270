"""The other ways to forget: retraining, DP-SGD for a group, and full-batch descent.

Each returns the same pair of model and record as ``unlearn``, so that certificates, reports and
comparisons treat all of them alike.
"""
