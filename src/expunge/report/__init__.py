"""The page about a release, for the data-protection officer and the engineer."""
