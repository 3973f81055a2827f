"""Layer 3: pictures and text from a trained model."""
