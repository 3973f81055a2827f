"""BAGEL: a mixture of transformers that reads and writes texts and images (``UnifiedModel``)."""
