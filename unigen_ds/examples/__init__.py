"""Example tasks. Their configs load them through ``custom_imports``, as users load their own."""
