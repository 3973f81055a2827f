"""Texts and conversations -> token ids.

In: a text, or messages with a chat template. Out: ids and which of them are learned (``chat.py``). Texts that spell
special tokens stay ordinary text. The class to know is ``ModelTokenizer`` (``tokenizers.py``).
"""
