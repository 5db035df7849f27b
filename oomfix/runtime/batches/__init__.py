"""Batches: their rows, and how the results of parts become the result of the whole."""
