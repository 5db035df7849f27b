"""The simulated GPU: what a training step needs in memory, measured without one."""
