# Queue, proxy, fabric and their benchmarks; see csrc.
from typing import Any

def __getattr__(name: str) -> Any: ...
