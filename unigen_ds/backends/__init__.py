"""Layer 2: engines with one interface. Imports only ``core``; an engine's private attributes are used in its file."""
