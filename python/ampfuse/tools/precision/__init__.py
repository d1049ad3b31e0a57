"""Compares what a program does in float32 and in 16-bit precisions."""
