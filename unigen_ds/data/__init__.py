"""Records -> samples -> a global order -> packed sequences -> micro-batches. Imports only ``core``."""
