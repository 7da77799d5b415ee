"""weft: train large language models with PyTorch, from one laptop CPU to hundreds of GPUs."""

__version__ = "0.1.0"
