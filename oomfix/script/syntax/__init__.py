"""The syntax of a file: names, scopes, imports and arguments, by Python's own rules."""
