# What benchmarks measure with, in C++: see native/.
from typing import Any

def __getattr__(name: str) -> Any: ...
