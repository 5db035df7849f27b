"""Edits of a script's text: layout, indentation, imports and lines, with every other byte left alone."""
