# Fibers and grids of the simulator; see csrc/simulator.
from typing import Any

def __getattr__(name: str) -> Any: ...
