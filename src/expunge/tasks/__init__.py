"""Small data and networks for the demonstration and the documents: samples, digits, networks."""
