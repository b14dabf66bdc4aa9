"""What one rank does in a training step: the kernels it computes and the collectives it sends.

One list of kernels, one derivation of collectives: every reader of either (rows, profiler, summary) takes it from
here. No times.
"""
