"""Run a program that is written for DeepEP, such as one of its own tests, with tilescale_net in DeepEP's place.

    python tests/deep_ep/run_peer_tests.py FOLDER/test_low_latency.py --num-processes 2

The program is run as it is, with the arguments behind its name, and so are the processes that it starts: `import deep_ep`
finds a module that calls `tilescale_net.deep_ep.install`. docs/integrations.md names where the tests come from.

Without a GPU they run in the simulator, on the stand-in for torch's CUDA of tests/clients. Nothing is timed there: what
DeepEP's `bench` measures is called once, and `bench_kineto`, which looks for kernels in a profile of a GPU, answers a second.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
STAND_IN = """import sys
del sys.modules["deep_ep"]
import tilescale_net.deep_ep
tilescale_net.deep_ep.install()
"""
# DeepEP's own files for its tests, which take names from its compiled part and call none of them.
UTILITIES = """import types
import deep_ep.utils
deep_ep.utils.__path__.append({folder!r})
deep_ep._C = sys.modules["deep_ep._C"] = types.ModuleType("deep_ep._C")
deep_ep._C.__getattr__ = lambda name: None if name.startswith("__") else lambda *given, **named: None
"""
IN_SIMULATOR = """import importlib.util
import torch
if not torch.cuda.is_available():
    from tests.clients import stand_ins
    stand_ins.torch_cuda()

    def bench(measured, *given, **named):
        measured()
        return 1.0, 1.0, 1.0

    def bench_kineto(measured, kernel_names, *given, num_kernels_per_period=1, **named):
        time = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
        return time if isinstance(kernel_names, str) else (time,) * len(kernel_names)

    for name in ("utils", "deep_ep.utils.testing"):  # beside the tests of the first version; of the second
        if importlib.util.find_spec(name):
            vars(importlib.import_module(name)).update(bench=bench, bench_kineto=bench_kineto)
"""


def stand_in(program: Path) -> str:
    """The text of deep_ep.py for a program, with the utilities of the checkout of DeepEP that it lies in."""
    folders = (parent / "deep_ep" / "utils" for parent in program.resolve().parents)
    found = next((folder for folder in folders if folder.is_dir()), None)
    return STAND_IN + (UTILITIES.format(folder=str(found)) if found else "") + IN_SIMULATOR


def main() -> int:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"{__doc__}\n{sys.argv[0]}: the first argument must be a Python file")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "deep_ep.py").write_text(stand_in(Path(sys.argv[1])))
        found = [folder, str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, *sys.argv[1:]], env=os.environ | {"PYTHONPATH": os.pathsep.join(found)}
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
