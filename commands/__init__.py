"""The commands of `octavo` that need a file of their own; `generate` and `record` are in `__main__`."""
