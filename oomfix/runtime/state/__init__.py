"""What a forward reads, writes and draws, kept so that a run can be undone or made again."""
