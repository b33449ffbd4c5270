"""``make bench``: ratios measured in one run, suite by suite.

A suite is a file ``benchmarks/NAME.py``, NAME one of ``benchmarks.run.SUITES``, with

- a docstring: what is compared with what, on which data;
- ``TARGETS: dict[str, float]``: name of a row → the largest ratio that the issues allow;
- ``run() -> list[Row]``: rows made by :func:`benchmarks.timing.compare` from times that
  :func:`benchmarks.timing.measure` took in turns, or a ``Row(name, ratio, low, high)`` of its own;
  a row that cannot be measured here is ``skip(name, "needs EXPUNGE_DATA")``.

Nothing is measured at import. A row that ``TARGETS`` does not name is printed without a target; a
name in ``TARGETS`` without its row fails the suite. Every suite runs in a fresh process with one
thread (``OMP_NUM_THREADS=1``); all six together in under six minutes, so about one minute each.
"""
