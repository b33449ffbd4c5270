"""Requests of people to be forgotten, and the certified releases that answer them.

>>> from expunge_ledger import Ledger
"""

from expunge_ledger.ledger import Ledger

__all__ = ["Ledger"]
