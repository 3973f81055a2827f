"""PyTorch's FSDP2: ``FSDPBackend``.

``dcp_files.py`` names the files of a distributed checkpoint; ``whole_matrices.py`` steps optimizers that need whole
matrices.
"""
