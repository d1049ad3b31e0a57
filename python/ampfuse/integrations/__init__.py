"""Parts for other frameworks. Each module needs its framework, and is imported by its own name."""
