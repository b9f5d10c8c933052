"""What `python -m tilescale_net info` has found, as text."""


def lines(found: dict) -> list[str]:
    """The report, one fact a line."""
    out = [f"tilescale_net {found['tilescale_net']}, Python {found['python']}"]
    out += [f"  {name} {version or 'not installed'}" for name, version in found["packages"].items()]
    out.append(
        f"NVIDIA driver: {found['driver'] or 'none'}; CUDA of torch: {found['cuda'] or 'none, it is built without'}"
    )
    out.append(f"device: {found['device']['kind']} ({found['device']['why']})")
    for ordinal, g in enumerate(found["gpus"]):
        peers = ", ".join(f"{n} ({g['links'][str(n)]})" for n in g["peers"]) or "none"
        out.append(
            f"  GPU {ordinal}: {g['name']}, compute capability {g['compute_capability']}, {g['memory'] >> 30} GiB, PCI "
            f"{g['pci']}, NUMA node {g['numa_node'] or '?'}, maps GPUs {peers}"
        )
    if isinstance(found["nics"], str):
        out.append(f"NICs: {found['nics']}")
    for nic in found["nics"] if isinstance(found["nics"], list) else ():
        near = f", nearest to GPUs {', '.join(map(str, nic['near']))}" if nic["near"] else ""
        out.append(
            f"  NIC {nic['name']}: {nic['driver']}, {nic['state']}, {nic['rate']}, NUMA node {nic['numa_node']}{near}"
        )
    out.append(f"nvcc: {found['nvcc'] or 'none (needed to compile kernels for a GPU)'}")
    out.append(f"host compiler: {found['host_compiler']}")
    library = found["libfabric"]
    out.append(
        f"libfabric: {library}" if isinstance(library, str) else f"libfabric {library['version']}: {library['path']}"
    )
    for p in found["providers"] if isinstance(found["providers"], list) else ():
        marks = (", a NIC" if p["hardware"] else "") + (", reaches GPU memory" if p["device_memory"] else "")
        out.append(f"  provider {p['provider']}: {', '.join(p['domains'])}{marks}")
    for where, chosen in found["network"].items():
        if isinstance(chosen, str):
            out.append(f"between nodes of {where}: {chosen}")
        else:
            rails = f", {chosen['rails']} rails" if chosen["rails"] > 1 else ""
            out.append(
                f"between nodes of {where}: {chosen['provider']} on {chosen['interface']}{rails} ({chosen['why']})"
            )
    out += [f"set: {name}={value}" for name, value in found["settings"].items()]
    return out
