"""Hooks that look at the model: validation (``EvaluateHook``), previews, the moving average."""
