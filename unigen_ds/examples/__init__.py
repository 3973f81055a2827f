"""Tasks that show the package at work. Their configs load them through ``custom_imports``, as users load their own."""
