"""Edits of scripts that rules offer."""
