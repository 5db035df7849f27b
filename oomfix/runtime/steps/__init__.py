"""Optimizer steps: loss scales, clipping, and what counts as an optimizer."""
