"""Any model of transformers by its own class, tokenizer, processor and chat template: ``CausalLM``, ``ImageTextToText``."""
