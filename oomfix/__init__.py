"""oomfix: find and fix what makes PyTorch training die with CUDA out of memory."""

__version__ = "0.1.0"
