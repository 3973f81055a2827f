"""What a run will need, computed before it starts: the memory of every process, from the real code without memory."""
