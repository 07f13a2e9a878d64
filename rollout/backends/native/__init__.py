"""Plain C kernels for CPUs, built at first use, called through ctypes; torch can replace them."""
