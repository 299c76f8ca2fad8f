"""Models: the only room that knows transformers. `pull` and `gguf` bring weights to disk, `text` turns text into tokens, `hf` runs the model."""
