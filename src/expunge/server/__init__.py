"""The ledger over HTTP: a JSON API for programs, and pages for a data-protection officer."""
