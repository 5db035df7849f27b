"""Edits that change nothing of what a script does, and after which more of its losses can be sliced."""
