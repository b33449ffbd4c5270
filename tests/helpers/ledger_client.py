"""A client: files requests from one number to another, and some of the next client's again.

The second half waits for the first release: whoever files keeps SQLite's lock from a worker, and
nothing would run while requests come in.
"""

import sys
import time

import expunge

url, key, start, stop, again = sys.argv[1:]
first, last = int(start), int(stop) + int(again)
end = time.monotonic() + 600
with expunge.Ledger(url, key=key) as ledger:
    for number in range(first, last):
        while number == (first + last) // 2 and not ledger.models("shop")[0].releases:
            assert time.monotonic() < end, "no release"
            time.sleep(0.05)
        ledger.request(f"person-{number % 1000}")
