"""Processes that tests start: ``client`` files requests, ``worker`` works until it is killed."""

import sys
import time

from expunge_ledger import Ledger
from ledger.tests import stand_in

if __name__ == "__main__":
    stand_in.install()
    role, url, key, *numbers = sys.argv[1:]
    with Ledger(url, key=key) as ledger:
        if role == "client":
            for i in range(int(numbers[0]), int(numbers[1])):
                ledger.request(f"person-{i}")
                if i % 10 == 0:
                    ledger.request(f"person-{i}")
        while role == "worker":
            if not ledger.work():
                time.sleep(0.02)
