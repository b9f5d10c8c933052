"""What this interpreter lacks to run the package; called by launch.sh, by path, before anything can be imported.

    python tilescale_net/launch/requirements.py check [EXTRA…]     file name suffix of extensions, then what is missing, by line
    python tilescale_net/launch/requirements.py list [EXTRA…]      everything that a fresh environment installs, by line

The packages and their versions are those of pyproject.toml; nothing is listed a second time.
"""

import ctypes
import os
import re
import shutil
import sys
import sysconfig
from importlib import metadata

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# What nvcc is made of.
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")


def _project() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        return tomllib.load(f)


def _extras(content: dict) -> dict[str, list[str]]:
    """What users may request, and what only work on a checkout needs."""
    return {**content["project"]["optional-dependencies"], **content["dependency-groups"]}


def dependencies() -> list[str]:
    """What the package depends on: of a checkout, or as it was installed."""
    if os.path.exists(os.path.join(ROOT, "pyproject.toml")):
        return list(_project()["project"]["dependencies"])
    return [r for r in metadata.requires("tilescale_net") or [] if "extra ==" not in r]


def name_of(requirement: str) -> str:
    """Distribution name of a requirement such as `torch>=2.6; python_version < "4"`."""
    return re.match(r"[A-Za-z0-9._-]+", requirement).group(0)


def _version(text: str) -> tuple[tuple[int, ...], int]:
    """Numbers of a version without the zeros at the end, and -1 before that release, 0 for it, 1 after it; to be compared."""
    release, rest = re.match(r"(\d+(?:\.\d+)*)([^+]*)", text).groups()
    numbers = tuple(int(n) for n in re.sub(r"(\.0+)+$", "", release).split("."))
    return numbers, 0 if not rest else 1 if "post" in rest else -1


# By PEP 440; versions before and after a release belong to neither of the ranges that end there.
_ALLOWED = {
    "==": lambda found, limit: found == limit,
    "!=": lambda found, limit: found != limit,
    ">=": lambda found, limit: found >= limit,
    "<=": lambda found, limit: found <= limit,
    "<": lambda found, limit: found[0] < limit[0],
    ">": lambda found, limit: found[0] > limit[0],
}


def satisfied(requirement: str) -> bool:
    """Whether the distribution is installed, in a version that the requirement allows."""
    try:
        found = metadata.version(name_of(requirement))
    except metadata.PackageNotFoundError:
        return False
    limits = re.sub(r"^[A-Za-z0-9._-]+\s*(\[.*?\])?", "", requirement.partition(";")[0])
    for limit in filter(None, map(str.strip, limits.split(","))):
        how, version = re.fullmatch(r"([=!<>]=|[<>])\s*(\d[\w.]*)", limit).groups()
        if not _ALLOWED[how](_version(found), _version(version)):
            return False
    return True


def _opens(*libraries: str) -> bool:
    for library in libraries:
        try:
            ctypes.CDLL(library)
            return True
        except OSError:
            continue
    return False


def _stand_in(name: str) -> bool:
    """Whether the machine itself offers what a package is there for."""
    if name in COMPILER:
        home = os.path.join(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "", "bin")
        return bool(shutil.which("nvcc", path=home) or shutil.which("nvcc"))
    if name.startswith("nvidia-cuda-"):  # headers for the simulator, which is not used where there is a driver
        return _opens("libcuda.so.1")
    if name == "mpich":  # libfabric
        explicit = os.environ.get("TSN_LIBFABRIC", "libfabric.so.1")
        return _opens(explicit, "/opt/amazon/efa/lib/libfabric.so.1", "libfabric.so.1")
    return False


def missing(extras: list[str]) -> list[str]:
    """Requirements of the package, and of the extras, that neither this interpreter nor the machine fulfils."""
    try:
        content = _project()
    except ImportError:  # an interpreter of 3.10 without pip has none of them
        return ["pip"]
    wanted = list(content["project"]["dependencies"])
    for extra in extras:
        wanted += _extras(content)[extra]
    return [r for r in wanted if not satisfied(r) and not _stand_in(name_of(r))]


def fresh(extras: list[str]) -> list[str]:
    """Requirements of a new environment: build tools, dependencies, and all extras named, without duplicates."""
    content = _project()
    wanted = content["build-system"]["requires"] + content["project"]["dependencies"]
    for extra in extras:
        wanted += _extras(content)[extra]
    return list(dict.fromkeys(wanted))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["check"]:
        print(sysconfig.get_config_var("EXT_SUFFIX"), *missing(arguments[1:]), sep="\n")
    elif arguments[:1] == ["list"]:
        print(*fresh(arguments[1:]), sep="\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 (run by whichever python3 there is)
        sys.exit(f"tilescale_net needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    main(sys.argv[1:])
