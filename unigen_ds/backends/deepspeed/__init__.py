"""The DeepSpeed engine, ZeRO-1 to ZeRO-3: ``DeepSpeedBackend``."""
