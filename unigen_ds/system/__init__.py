"""Processes, files, log and clock: what a run needs of the machine. Imports ``core`` only."""
