"""Measures of a run that hold for any task."""
