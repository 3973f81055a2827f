"""Layer 5: durable checkpoints. ``saver`` writes one, ``store`` finds and verifies, ``layouts`` read any of them."""
