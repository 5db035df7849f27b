"""What a rewritten loop needs around it: prepared models, freed stages, loaders, local fixes."""
