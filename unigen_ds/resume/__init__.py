"""Floor 5: what a resume loads, drops and re-maps, decided before anything is touched."""
