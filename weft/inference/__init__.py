"""Load a checkpoint for generation, chat and evaluation.

Read `weft.inference.inference_model` first, then `weft.inference.generate`.
"""
