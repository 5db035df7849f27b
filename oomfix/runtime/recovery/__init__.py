"""What a call does that has run out of memory and cannot be split any finer: the ladder of techniques."""
