"""Where records come from: one module for each kind of file, and ``find``, which recognises the kind."""
