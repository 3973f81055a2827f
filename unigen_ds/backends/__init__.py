"""Floor 2: engines behind one interface. Imports ``core`` alone; private attributes of an engine stay in its file."""
