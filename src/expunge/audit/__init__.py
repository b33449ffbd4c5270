"""Attacks on the noisy engine: worst cases, run many times, and what they prove about ε."""
