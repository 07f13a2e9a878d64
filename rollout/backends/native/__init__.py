"""Plain C kernels for CPUs: built at first use, called through ctypes, always replaceable by torch."""
