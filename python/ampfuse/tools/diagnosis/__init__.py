"""The time of training steps: where it goes, and what limits it."""
