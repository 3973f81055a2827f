"""PyTorch's FSDP2: ``FSDPBackend``. ``dcp_files.py`` names the files of a distributed checkpoint."""
