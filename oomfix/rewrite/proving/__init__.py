"""Runs of a script before and after its rewrite, on a simulated card or by the user's own command."""
