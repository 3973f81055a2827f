"""Everything that can fail before training, checked without training: ``tools/train.py CONFIG --dry-run``."""
