"""Kernels written with the primitives of tilescale_net; NVSHMEM baselines beside them."""
