"""A client: files requests from one number to another, and some of the next client's again."""

import sys

import expunge

url, key, start, stop, again = sys.argv[1:]
with expunge.Ledger(url, key=key) as ledger:
    for number in range(int(start), int(stop) + int(again)):
        ledger.request(f"person-{number % 1000}")
