"""The tools: what a program spends memory and time on, and which precision suits it."""
