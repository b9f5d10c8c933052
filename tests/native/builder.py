"""Compiles the plain C++ test programs, plain and under sanitizers, once per change of a file they are made of."""

import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import lacking
from tilescale_net.runtime import private_folder

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(tempfile.gettempdir()) / f"tilescale_net-tests-{os.getuid()}"
BASE = [
    "-std=c++17",
    "-O0",  # compiled in half the time; runs are short
    "-g1",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-I{ROOT}",
    "-iquote",
    f"{ROOT}/tilescale_net/device",
]
SANITIZERS = {
    "": [],
    "thread": ["-fsanitize=thread"],
    "fuzzer": ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-O2"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def compiler(sanitizer: str) -> str:
    """The C++ compiler for a variant; clang for the sanitizers, whose ThreadSanitizer handles atomic fences best."""
    if sanitizer:
        return lacking.program("clang++-14", "clang", "clang++")
    named = os.environ.get("CXX", "g++")
    return lacking.program(named, "g++", "g++", "clang++", "c++")


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _object(command: list[str], source: str | tuple[str, ...], folder: Path) -> Path:
    if isinstance(source, tuple):
        text = "".join(f'#include "{ROOT / name}"\n' for name in source)
        path = folder / f"together_{hashlib.sha256(text.encode()).hexdigest()[:12]}.cpp"
        if not path.exists():
            path.write_text(text)
        out = path.with_suffix(".o")
    else:
        path = ROOT / source
        out = folder / (source.replace("/", "_") + ".o")
    record = out.with_suffix(".json")
    if out.exists() and record.exists():
        known = json.loads(record.read_text())
        if known and all(_digest(path) == digest for path, digest in known.items()):
            return out
    depfile = out.with_suffix(".d")
    done = subprocess.run(
        [*command, "-MMD", "-MF", str(depfile), "-c", str(path), "-o", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{source} does not compile:\n{done.stderr}"
    # Absolute, since ccache may have made them relative to this folder.
    used = map(os.path.abspath, depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split())
    record.write_text(json.dumps({path: _digest(path) for path in used if path.startswith(str(ROOT))}))
    return out


def _folder(command: list[str]) -> Path:
    folder = CACHE / hashlib.sha256(" ".join(command).encode()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    return folder


def build(
    name: str,
    sources: list[str | tuple[str, ...]],
    sanitizer: str = "",
    flags: tuple[str, ...] = (),
    shared: bool = False,
    apart: tuple[set[str], tuple[str, ...]] = (set(), ()),
) -> Path:
    """Path of the program (or shared library) `name` made from `sources`, which are relative to the repository.

    Those in a tuple are compiled as one file, which takes a third of the time: names in unnamed namespaces are
    distinct. `apart` are some of them and flags for these alone: the others are compiled once for programs with and without.

    Fails the test when something does not compile; skips it when there is no compiler for the sanitizer.
    """
    command = [compiler(sanitizer), *BASE, *SANITIZERS[sanitizer], *flags, *(["-fPIC"] if shared else [])]
    assert private_folder.make(CACHE), f"{CACHE} belongs to another user; remove it"
    folder = _folder(command)

    def compiled(source: str | tuple[str, ...]) -> Path:
        special = [*command, *apart[1]] if source in apart[0] else command
        return _object(special, source, _folder(special))

    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, sources))
        out = folder / (name + (".so" if shared else ""))
        if not out.exists() or any(o.stat().st_mtime_ns > out.stat().st_mtime_ns for o in objects):
            partial = out.with_suffix(".part")
            link = [*command, *(["-shared"] if shared else []), *map(str, objects), "-o", str(partial)]
            done = subprocess.run([*link, "-ldl", "-lpthread"], capture_output=True, text=True)
            assert done.returncode == 0, f"{name} does not link:\n{done.stderr}"
            os.replace(partial, out)
    return out


def run(program: Path, *arguments: str, timeout: float = 120, env: dict[str, str] | None = None) -> str:
    """Output of a program that must end with status 0."""
    settings = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "TSN_CHAOS": "", **(env or {})}
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=timeout, env=settings)
    assert done.returncode == 0, f"{program.name} {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
