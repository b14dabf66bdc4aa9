"""How long: the compute profile, the times that it or a placeholder gives each kernel, and the rates they mean.

A time carries where it came from. Nothing here measures: that is `profiler/`.
"""
