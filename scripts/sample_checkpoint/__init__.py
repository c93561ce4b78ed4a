"""Generator of DeepSeek-V4.1 checkpoints of any size, independent of the package that it helps to judge."""
