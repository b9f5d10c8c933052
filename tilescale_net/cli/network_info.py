"""What `python -m tilescale_net info` says of networks: libfabric, its providers, and which of them a job would use."""


def libfabric() -> dict:
    """Its version and path."""
    from tilescale_net.runtime import fabric

    return fabric.library()


def providers() -> list[dict]:
    """One dict a provider: its domains, whether a NIC is behind it, and whether it reaches GPU memory."""
    from tilescale_net.runtime import fabric

    found: dict[str, dict] = {}
    for offer in fabric.offers():
        entry = found.setdefault(
            offer["provider"], {"provider": offer["provider"], "domains": [], "hardware": False, "device_memory": False}
        )
        if offer["domain"] not in entry["domains"]:
            entry["domains"].append(offer["domain"])
        entry["hardware"] |= offer["hardware"]
        entry["device_memory"] |= offer["device_memory"]
    return list(found.values())


def chosen(multi_host: bool) -> dict:
    """What ranks of different nodes would use, and why."""
    from tilescale_net import _native
    from tilescale_net.runtime import fabric, settings

    p = _native.Transport(fabric.transport_options(multi_host=multi_host)).properties()
    named = [row.name for row in (settings.PROVIDER, settings.FABRIC_INTERFACE, settings.CHAOS) if row.get()]
    if named:
        why = f"{' and '.join(named)} {'say' if len(named) > 1 else 'says'} so"
    elif p["link_gbps"] or p["device_memory"]:
        why = "a NIC comes before software"
    else:
        why = "no NIC for remote memory; of software providers, tcp comes first"
    keys = ("provider", "interface", "rails", "link_gbps", "device_memory")
    return {**{key: p[key] for key in keys}, "why": why}
