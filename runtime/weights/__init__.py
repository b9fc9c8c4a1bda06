"""Weights from GGUF files, Hugging Face folders, or a seed; `resolve.resolve_model` finds which."""
