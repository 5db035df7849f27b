"""What the trace of a script means: training loops, windows, evaluation passes, what is kept, devices."""
