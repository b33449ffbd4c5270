"""Jobs: ``job.toml`` read, checked, run, planned and replayed on the public calls of expunge."""
