"""The ledger in a browser, and for programs."""
