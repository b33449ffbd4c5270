"""Requests of people, and the releases that answer them: due when, held where, proven by what."""
