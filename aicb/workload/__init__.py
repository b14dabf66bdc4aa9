"""The workload: the rows of one rank, the SimAI text that holds them, and reading it back.

Each output format is one writer beside simai.py.
"""
