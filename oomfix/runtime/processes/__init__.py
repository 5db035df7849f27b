"""Training in several processes: replicas, shards, and what is exchanged between them."""
