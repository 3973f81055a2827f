"""Hooks that write: metrics and log lines (``LoggerHook``), times, ledger and timeline."""
