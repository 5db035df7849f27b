"""Edits of a source, and their safe writing to disk."""
