"""Data pipeline: source -> tokenizer -> token store -> loader."""
