"""Every operation the layers and the sampler need, one file per implementation."""
