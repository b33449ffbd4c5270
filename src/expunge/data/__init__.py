"""Examples, and whose they are: the one word that every route takes its data by."""
