class TaskManager:
    """Finds tasks by name."""
