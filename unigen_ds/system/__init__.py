"""Processes, files, log and clock: what a run needs of the machine.

``dist`` starts and ends the process group, ``rank_errors`` carries the errors of ranks, ``files`` writes durably and
deletes, ``journals`` reads JSON lines over kills and resumes. Imports ``core`` only.
"""
