"""Floor 5: what happens around the loop. One hook a file; a new one registers itself in ``HOOKS``."""
