"""The command `python -m ampfuse`, which runs an unchanged program with ampfuse."""
