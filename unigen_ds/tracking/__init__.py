"""Where metrics are shown besides ``metrics.jsonl``: one log writer per file."""
