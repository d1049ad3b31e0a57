"""`python -m ampfuse`: a program that knows nothing of ampfuse, run with it."""
