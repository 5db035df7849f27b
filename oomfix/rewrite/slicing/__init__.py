"""The slice of a loss: what its backward depends on, and how that becomes a function of the batch."""
