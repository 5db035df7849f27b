"""May a batch be split? Checks that run a forward on a few rows, whole and in parts."""
