"""Layer 7: what happens around the training loop. One hook in each file; a new one registers itself in ``HOOKS``."""
