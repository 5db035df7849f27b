"""Memory techniques, each usable alone."""
