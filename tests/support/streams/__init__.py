"""Proves that CUDA streams are ordered, without a device: what is enqueued is written down, and checked."""
