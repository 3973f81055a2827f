"""Measures of a run that apply to any task."""
