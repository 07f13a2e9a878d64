"""The device seam: everything that differs between devices, behind four protocols."""
