"""Bookkeeping: which cell holds what, who may see it, where the next token goes. NumPy and Numba; no torch, no K/V bytes."""
