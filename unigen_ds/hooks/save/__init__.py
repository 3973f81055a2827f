"""Hooks that keep: checkpoints (``CheckpointHook``), the best one, early stopping, exports, the hub."""
