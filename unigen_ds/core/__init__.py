"""Floor 1: values and small tools that every wing shares. Imports nothing of the project but itself."""
