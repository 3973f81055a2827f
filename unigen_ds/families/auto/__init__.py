"""Any model of transformers by its own class, tokenizer and chat template: ``CausalLM``, ``ImageTextToText``."""
