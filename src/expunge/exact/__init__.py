"""Exact routes for any network: training again, by the operator's own function."""
