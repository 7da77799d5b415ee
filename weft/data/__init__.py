"""From text to batches: source -> tokenizer -> store -> loader."""
