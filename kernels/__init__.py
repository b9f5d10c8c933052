"""Kernels written with the primitives of tilescale_net; imported as `tilescale_net.kernels`, in a checkout too."""

# The folder stands at the top of the checkout, where a bare `import kernels` would find it: a second copy of every
# module, or this package in the place of another distribution of that name.
if __name__ != "tilescale_net.kernels":
    raise ImportError("these are the kernels of tilescale_net: import tilescale_net.kernels")
