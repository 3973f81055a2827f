"""Floor 3: pictures and text out of a trained model."""
