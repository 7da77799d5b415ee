"""Train large language models with PyTorch, on one CPU or hundreds of GPUs."""

__version__ = "0.1.0"
