"""Memory of the card: errors, readings, the allocator and its cache."""
