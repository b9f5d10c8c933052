"""The package can be installed beside servers: one set of versions satisfies its requirements, tilelang's and theirs.

Recorded here are the published wheels' metadata about the distributions that this package and tilelang need. Servers
are not downloaded: their wheels and torch's are gigabytes.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile

import pytest

from tilescale_net.compiler.toolchain import TILELANG_VERSIONS
from tilescale_net.launch.set_up import _project

packaging = pytest.importorskip("packaging.requirements", reason="lacks packaging")
specifiers = pytest.importorskip("packaging.specifiers", reason="lacks packaging")

COMMON = "cloudpickle ml-dtypes numpy>=1.23.5 psutil tqdm>=4.62.3 typing-extensions>=4.10.0 z3-solver<4.15.5,>=4.13.0"
TILELANG = {
    "0.1.12": "apache-tvm-ffi<=0.1.11,>=0.1.10 torch-c-dlpack-ext " + COMMON,
    "0.1.13": "apache-tvm-ffi<0.1.13,>=0.1.11 torch-c-dlpack-ext " + COMMON,
    "0.1.14": "apache-tvm-ffi<0.1.13,>=0.1.11 torch-c-dlpack-ext " + COMMON,
    "0.1.15": "apache-tvm-ffi<0.1.13,>=0.1.11 torch-c-dlpack-ext " + COMMON,
}
# With cuda-toolkit[cudart], which names the version of nvidia-cuda-runtime.
TORCH = {
    "2.6.0": "typing-extensions>=4.10.0",
    "2.13.0": "typing-extensions>=4.10.0 cuda-bindings<14,>=13.0.3",
    "2.14.0": "typing-extensions>=4.10.0 cuda-bindings<14,>=13.0.3 nvidia-cuda-runtime==13.0.96.*",
    "2.14.1": "typing-extensions>=4.10.0 cuda-bindings<14,>=13.0.3 nvidia-cuda-runtime==13.0.96.*",
    "2.15.0": "typing-extensions>=4.13.0 cuda-bindings<14,>=13.0.3 nvidia-cuda-runtime==13.2.86.*",
}
# Of the servers, and of their pinned packages: flashinfer-python, quack-kernels, nvidia-cutlass-dsl, nvshmem4py-cu13, cuda-python.
SERVERS = {
    "vllm==0.33.0": "torch==2.14.0 tilelang==0.1.12 apache-tvm-ffi==0.1.11 numpy numba==0.65.0 psutil tqdm cloudpickle "
    "typing-extensions>=4.10 apache-tvm-ffi<0.2,>=0.1.11 cuda-bindings>=12.8 torch-c-dlpack-ext",
    "sglang==0.5.23": "torch==2.14.1 tilelang==0.1.12 apache-tvm-ffi==0.1.11 numpy numba==0.65.1 psutil tqdm "
    "apache-tvm-ffi<0.2,>=0.1.11 cuda-bindings~=13.4.4 torch-c-dlpack-ext",
    "megatron-core==0.16.1": "torch>=2.6.0 numpy packaging>=24.2",
}
# Versions that exist, from which one is chosen for each distribution.
EXISTING = {
    "tilelang": ["0.1.11", *TILELANG],
    "apache-tvm-ffi": ["0.1.10", "0.1.11", "0.1.12", "0.1.14.post1", "0.1.15.post2"],
    "torch": list(TORCH),
    "cuda-bindings": ["12.9.4", "13.0.3", "13.2.0", "13.4.4"],
    "nvidia-cuda-runtime": ["13.0.96", "13.2.86"],
    "nvidia-cuda-cccl": ["13.0.85", "13.2.86"],
    "z3-solver": ["4.12.6", "4.15.4.0", "4.15.8.0"],
    "numpy": ["1.26.4", "2.3.5", "2.4.6"],
    "typing-extensions": ["4.16.0"],
    "mpich": ["5.0.2"],
}


def ranges(texts):
    """Specifiers by distribution."""
    found: dict[str, list] = {}
    for requirement in map(packaging.Requirement, texts):
        found.setdefault(requirement.name.lower(), []).append(requirement.specifier)
    return found


def best(name, texts):
    """The newest existing version of a distribution that all requirements allow; None where there is none."""
    allowed = ranges(texts).get(name, [])
    return next((v for v in reversed(EXISTING[name]) if all(s.contains(v) for s in allowed)), None)


OURS = _project()["project"]["dependencies"]


def resolved(texts, tilelang=None):
    """Versions of the distributions that this package needs beside what `texts` require. Raises AssertionError where none do."""
    wanted = [*OURS, *texts] + ([f"tilelang=={tilelang}"] if tilelang else [])
    chosen = {name: best(name, wanted) for name in ("tilelang", "torch")}
    assert all(chosen.values()), chosen
    wanted += [*TILELANG[chosen["tilelang"]].split(), *TORCH[chosen["torch"]].split()]
    chosen = {name: best(name, wanted) for name in EXISTING}
    assert all(chosen.values()), f"no version of {[name for name, v in chosen.items() if v is None]}"
    return chosen


@pytest.mark.parametrize("server", SERVERS)
def test_installs_beside_servers(server):
    chosen = resolved(SERVERS[server].split())
    if "tilelang" in SERVERS[server]:
        assert (chosen["tilelang"], chosen["apache-tvm-ffi"]) == ("0.1.12", "0.1.11")


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("tilelang", TILELANG)
def test_installs_with_every_tilelang_and_torch(tilelang, torch):
    assert resolved([f"torch=={torch}"], tilelang)["torch"] == torch


def test_installable_versions_are_supported_versions():
    (allowed,) = ranges(OURS)["tilelang"]
    assert tuple(TILELANG) == TILELANG_VERSIONS
    assert [allowed.contains(v) for v in ("0.1.11", *TILELANG_VERSIONS, "0.1.16")] == [False, *[True] * 4, False]


def test_records_agree_with_installed_versions():
    """The table's row of the tilelang that runs here is its metadata."""
    version = importlib.metadata.version("tilelang").partition("+")[0]
    said = [text for text in importlib.metadata.requires("tilelang") if "extra ==" not in text and "Darwin" not in text]
    said = {re.split(r"[;\s]", text)[0] for text in said} - {"torch"}
    assert {str(packaging.Requirement(text)) for text in said} == {
        str(packaging.Requirement(text)) for text in TILELANG[version].split()
    }


def wheel(folder, name, version, requirements):
    """A wheel that holds nothing but its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        wanted = "".join(f"Requires-Dist: {text}\n" for text in requirements)
        file.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{wanted}"
        )
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.parametrize("server", ["vllm==0.33.0", "sglang==0.5.23"])
def test_pip_resolves(server, tmp_path):
    """pip's own resolver, over wheels of the recorded metadata."""
    needs = {("tilescale_net", "1"): OURS, tuple(server.split("==")): SERVERS[server].split()}
    needs |= {(name, version): [] for name, versions in EXISTING.items() for version in versions}
    for name, table in (("tilelang", TILELANG), ("torch", TORCH)):
        needs |= {(name, version): text.split() for version, text in table.items()}
    for wanted in [*map(packaging.Requirement, sum(needs.values(), []))]:
        if wanted.name not in {name for name, _ in needs}:
            exact = [part.version for part in wanted.specifier if part.operator == "=="]
            needs[wanted.name, exact[0] if exact else "999"] = []
    for (name, version), requirements in needs.items():
        wheel(tmp_path, name, version, requirements)
    options = "--dry-run --ignore-installed --no-index --disable-pip-version-check -q --report -".split()
    command = [sys.executable, "-m", "pip", "install", *options, "--find-links", str(tmp_path), "tilescale_net", server]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    chosen = {each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(done.stdout)["install"]}
    assert (chosen["tilelang"], chosen["apache-tvm-ffi"]) == ("0.1.12", "0.1.11")
