"""One call of the manager: its micro-batches, their weights and sizes, in one process or several."""
