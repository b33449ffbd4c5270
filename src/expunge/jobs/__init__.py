"""From ``job.toml`` to a run directory.

A job is read and checked as a whole, its functions and data loaded, its recipe settled, run by one
process or many, resumed after a crash, and written in one rename; folders of jobs likewise.
"""
