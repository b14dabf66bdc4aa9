"""Measures: times every kernel of `aicb.kernels` on the device at hand; the only package that imports torch."""
