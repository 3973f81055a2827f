"""Layer 1: values and small tools that every package uses. Of the project, it imports only itself."""
