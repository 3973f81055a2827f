"""Hooks that keep: checkpoints (``CheckpointHook``), the best weights, exports, the hub."""
