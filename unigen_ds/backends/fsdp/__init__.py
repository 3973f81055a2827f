"""PyTorch's FSDP2: ``FSDPBackend``."""
