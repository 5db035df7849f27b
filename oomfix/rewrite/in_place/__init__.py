"""The in-place form: backward, step, windows and precision handed to the manager where they stand."""
