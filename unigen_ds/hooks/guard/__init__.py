"""Hooks that end or question a run: NaN, a first update that is wrong, signals, a time limit."""
