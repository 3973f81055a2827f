"""Layer 7: what a resume loads, drops and changes, decided before anything is modified."""
