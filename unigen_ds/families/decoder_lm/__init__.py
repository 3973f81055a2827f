"""Causal language models of transformers' own classes: Llama and Qwen2 (``DecoderLM``)."""
