"""Layer 2: parameter groups, optimizers, weight averages. Imports ``core`` only."""
