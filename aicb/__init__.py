"""Describe one training iteration of a language model as a SimAI workload. Importing this imports nothing else."""

__version__ = "0.1.0"
