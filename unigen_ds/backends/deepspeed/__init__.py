"""The DeepSpeed engine (ZeRO-0 to ZeRO-3): ``DeepSpeedBackend``.

``deepspeed_config.py`` makes one config of DeepSpeed's JSON and ours; ``deepspeed_files.py`` names the state files.
"""
