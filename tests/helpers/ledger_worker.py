"""Workers, one after the other, each killed at a random moment; the last line is how many."""

import os
import random
import signal
import sys
import time

import expunge
from expunge.jobs import releases  # noqa: F401
from expunge.ledger import fulfilment, running  # noqa: F401 (loaded once, before the forks)

url, key, kills, seed = sys.argv[1:]
chance = random.Random(int(seed))
done = 0
for _ in range(int(kills)):
    child = os.fork()
    if child == 0:
        ledger = expunge.Ledger(url, key=key)
        while True:
            ledger.work(most=3, lease=0.4)
            time.sleep(0.01)
    time.sleep(0.1 + chance.random() * 1.2)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    done += os.WTERMSIG(status) == signal.SIGKILL
print(done)
