"""Hosts as clusters have them: names that no resolver knows or that stand for loopback, a bridge with one address on all, IPv6 alone."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tilescale_net as tsn
from tests import hosts, ranks

pytestmark = pytest.mark.skipif(not hosts.possible(), reason="lacks root")


def _meet(own: bool) -> str:
    """The ranks of two hosts meet: in a group that the package makes, or in the program's own, and over the network."""
    if own:
        os.environ["GLOO_SOCKET_IFNAME"] = hosts.INTERFACE
        dist.init_process_group("gloo")
        del os.environ["GLOO_SOCKET_IFNAME"]
    tsn.init("4M")
    assert tsn.world().proxy.properties["interface"] == hosts.INTERFACE
    x = tsn.zeros(4)
    x.fill_(tsn.rank() + 1)
    tsn.barrier()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not own:
        group = dist.new_group([1, 0])
        seen = torch.ones(1)
        dist.all_reduce(seen, group=group)
        assert seen.item() == 2
    tsn.finalize()
    return interface


def _on_two_hosts(network: hosts.Hosts, *args, **env: str) -> list[ranks.Outcome]:
    env = network.environment | {"TSN_TIMEOUT": "20"} | env
    return ranks.launch(2, _meet, *args, env=env, init=False, timeout=60)


@pytest.mark.parametrize("ipv6", [False, True])
def test_names_that_no_resolver_knows(ipv6):
    with hosts.Hosts(2, ipv6) as network:
        outcomes = _on_two_hosts(network, False)
        assert [o.value for o in outcomes] == [hosts.INTERFACE] * 2, [o.error for o in outcomes]


def test_names_that_stand_for_loopback_on_their_host(tmp_path):
    """As Debian has it: MASTER_ADDR is 127.0.1.1 on the host of rank 0."""
    with hosts.Hosts(2) as network:
        for i, name in enumerate(network.names):
            known = [f"{network.addresses[j]} {other}" for j, other in enumerate(network.names) if j != i]
            text = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *known])
            Path(f"{tmp_path}/hosts.{i}").write_text(text + "\n")
        names = {hosts.NAMES: f"{tmp_path}/hosts", "MASTER_ADDR": network.names[0]}
        outcomes = _on_two_hosts(network, False, **names)
        assert [o.value for o in outcomes] == [hosts.INTERFACE] * 2, [o.error for o in outcomes]
        # Beside a group of the program's own no variable is set.
        outcomes = _on_two_hosts(network, True, **names)
        assert [o.value for o in outcomes] == [""] * 2, [o.error for o in outcomes]


def test_an_interface_by_which_hosts_do_not_reach_each_other():
    with hosts.Hosts(2) as network:
        begin = time.monotonic()
        for o in _on_two_hosts(network, False, GLOO_SOCKET_IFNAME="docker0", TSN_TIMEOUT="100"):
            kind, text, _ = o.error
            assert kind == "ConfigurationError" and "is not reached at 172.17.0.1" in text, o.error
            assert "let GLOO_SOCKET_IFNAME name, on every host" in text
        assert time.monotonic() - begin < 50
