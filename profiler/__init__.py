"""Measures: times every kernel of `aicb.step.kernels` on the device at hand; the only package that imports torch."""
