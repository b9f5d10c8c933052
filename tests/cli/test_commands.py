"""`tilescale_net info`, `doctor`, `settings`, `precompile`: their output here, and on machines that a test makes up."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import runtime

import tilescale_net
from tilescale_net import cli
from tilescale_net.cli import doctor, info
from tilescale_net.compiler import jit, toolchain
from tilescale_net.compiler.simulator import cache
from tilescale_net.runtime import private_folder

GPU = {"name": "H100", "compute_capability": "9.0", "memory": 80 << 30, "pci": "0000:04:00.0", "numa_node": "0"}


@pytest.fixture
def efa_machine(tmp_path, monkeypatch):
    """Two GPUs that cannot map each other, and two EFA devices without GPU memory, huge pages or memory to lock."""
    for index in range(2):
        pci = tmp_path / f"devices/pci000{index}:00/000{index}:00:1d.0"
        (pci / "infiniband").mkdir(parents=True)
        (pci / "numa_node").write_text(f"{index}\n")
        (tmp_path / "drivers/efa").mkdir(parents=True, exist_ok=True)
        (pci / "driver").symlink_to(tmp_path / "drivers/efa")
        nic = tmp_path / f"class/infiniband/rdmap{index}s0"
        (nic / "ports/1").mkdir(parents=True)
        (nic / "device").symlink_to(pci)
        (nic / "ports/1/state").write_text("4: ACTIVE\n" if index else "1: DOWN\n")
        (nic / "ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
        gpu = tmp_path / f"devices/pci000{index}:00/000{index}:04:00.0"
        gpu.mkdir()
        (tmp_path / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"bus/pci/devices/000{index}:04:00.0").symlink_to(gpu)
    monkeypatch.setattr(info, "SYS", tmp_path)
    monkeypatch.setattr(info, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\nHugePages_Total:       0\nHugePages_Free:        0\n")
    monkeypatch.setattr(info, "gpus", lambda: [GPU | {"peers": []}, GPU | {"pci": "0001:04:00.0", "peers": []}])
    limits = {doctor.resource.RLIMIT_MEMLOCK: 64 << 10, doctor.resource.RLIMIT_NOFILE: 256}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (limits[which],) * 2)
    return tmp_path


def test_nics_and_the_gpus_near_them(efa_machine):
    found = info.nics(["0000:04:00.0", "0001:04:00.0"])
    assert [(n["name"], n["driver"], n["state"], n["near"]) for n in found] == [
        ("rdmap0s0", "efa", "DOWN", [0]),
        ("rdmap1s0", "efa", "ACTIVE", [1]),
    ]
    assert info.nics([])[0]["near"] == []


def test_info_names_driver_cuda_and_links(tmp_path, monkeypatch):
    """With a torch and a CUDA runtime made up: three GPUs, of which two are joined by NVLink and one stands alone."""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n"
    (tmp_path / "driver/nvidia/version").write_text(text)
    monkeypatch.setattr(info, "PROC", tmp_path)
    assert info.driver() == "580.95.05"
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, total_memory=80 << 30, pci_domain_id=0, pci_bus_id=4, pci_device_id=0
    )
    access, atomics = {(0, 1), (1, 0), (0, 2), (2, 0)}, {(0, 1), (1, 0)}
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_properties": lambda ordinal: properties,
        "can_device_access_peer": lambda a, b: (a, b) in access,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    native = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    ask = lambda attribute, a, b: (0, int((a, b) in (atomics if attribute == native else access)))  # noqa: E731
    monkeypatch.setattr(runtime, "cudaDeviceGetP2PAttribute", ask)
    gpus = info.gpus()
    assert [g["links"] for g in gpus] == [{"1": "NVLink", "2": "PCIe"}, {"0": "NVLink"}, {"0": "PCIe"}]
    assert info.link(1, 2) == "none"
    monkeypatch.setattr(info, "_answer", lambda question: "not asked")
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = "\n".join(info.lines(info.collect()))
    assert "NVIDIA driver: 580.95.05; CUDA of torch: 13.0" in said and "maps GPUs 1 (NVLink), 2 (PCIe)" in said


@pytest.mark.parametrize(
    "check, name, state, remedy",
    [
        ("memlock", "memory that may be locked", doctor.MISSING, "ulimit -l unlimited"),
        ("open_files", "open files", doctor.WARNING, "ulimit -n"),
        ("huge_pages", "huge pages", doctor.WARNING, "vm.nr_hugepages"),
        ("nics", "NICs for remote memory", doctor.WARNING, "ibstat"),
        ("nics", "EFA: provider", doctor.MISSING, "install AWS's EFA software"),
        ("nics", "EFA: devices", doctor.MISSING, "--device /dev/infiniband"),
        ("gpu_network_memory", "GPU memory for NICs (DMABUF, peermem)", doctor.WARNING, "modprobe nvidia_peermem"),
    ],
)
def test_missing_requirements_have_a_remedy(efa_machine, monkeypatch, check, name, state, remedy):
    monkeypatch.setattr(doctor, "_dmabuf", lambda: False)
    found = {f.what: f for f in getattr(doctor.Doctor(), check)()}
    assert found[name].state == state and remedy in found[name].remedy, found


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "home").touch()
    for name in ("TILELANG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (found,) = doctor.Doctor().cache_of_tilelang()
    assert found.state == doctor.MISSING and "TILELANG_CACHE_DIR" in found.remedy
    below = f"{tempfile.gettempdir()}/tilescale_net-{os.getuid()}"
    moved = private_folder.for_tilelang()
    assert moved == {"TILELANG_CACHE_DIR": f"{below}/tilelang"}
    assert str(private_folder.of_user("simulator")) == f"{below}/simulator"
    monkeypatch.setenv("TILELANG_CACHE_DIR", moved["TILELANG_CACHE_DIR"])
    (found,) = doctor.Doctor().cache_of_tilelang()
    assert found.state == doctor.WARNING and "the home cannot be written" in found.found
    # Whoever imports this package first needs to set nothing.
    code = "import os, tilescale_net; print(os.environ['TILELANG_CACHE_DIR'])"
    env = {k: v for k, v in os.environ.items() if k != "TILELANG_CACHE_DIR"} | {"HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == f"{below}/tilelang", done.stderr
    env["XDG_CACHE_HOME"] = str(tmp_path / "home")  # nor can that: a folder of the process, which goes with it
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    own = done.stdout.strip()
    assert own.startswith(f"{tempfile.gettempdir()}/tilescale_net-") and not os.path.exists(own), done.stderr


def test_met_requirements_need_no_remedy(efa_machine, monkeypatch):
    (efa_machine / "modules").write_text("nvidia_peermem 16384 0 - Live\n")
    (efa_machine / "meminfo").write_text("HugePages_Total: 8\nHugePages_Free: 5\n")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (doctor.resource.RLIM_INFINITY,) * 2)
    patient = doctor.Doctor()
    for check in (patient.memlock, patient.open_files, patient.huge_pages, patient.gpu_network_memory):
        (finding,) = check()
        assert finding.state == doctor.GOOD and not finding.remedy, finding


def test_doctor_on_this_machine(capsys, monkeypatch):
    assert cli.main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["native part: simulator"]["state"] == doctor.GOOD and found["/dev/shm"]["found"]
    for name in ("Python", "torch", "tilelang"):
        assert found[name]["state"] == doctor.GOOD and ">=" in found[name]["found"] or "==" in found[name]["found"]
    # A check that fails is the exit code, and its remedy is printed.
    monkeypatch.setenv("CXX", "no-such-compiler")
    from tilescale_net.compiler.simulator import host_compiler

    host_compiler.compiler.cache_clear()
    try:
        code, out = cli.main(["doctor"]), capsys.readouterr().out
    finally:
        host_compiler.compiler.cache_clear()
    if not info.gpus():
        assert code == 1 and "missing  C++ compiler" in out
    assert "-> apt-get install g++" in out


def test_info_on_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tilescale_net"] == tilescale_net.__version__ and found["packages"]["torch"]
    assert found["device"] == {"kind": "simulator", "why": "TSN_DEVICE=simulator"}
    assert found["settings"]["TSN_DEVICE"] == "simulator"
    assert isinstance(found["providers"], list), found["providers"]
    assert found["network"]["one host"]["provider"] in [p["provider"] for p in found["providers"]]
    monkeypatch.setenv("TSN_PROVIDER", "shm")
    assert info.collect()["network"]["one host"]["why"] == "TSN_PROVIDER says so"
    text = "\n".join(info.lines(found))
    assert "device: simulator (TSN_DEVICE=simulator)" in text and "between nodes of one host: " in text


def test_wrong_settings_are_reported(capsys, monkeypatch):
    monkeypatch.setenv("TSN_HEAPSIZE", "1G")
    assert cli.main(["info"]) == 2
    assert "did you mean TSN_HEAP_SIZE?" in capsys.readouterr().err


def test_the_command_line_starts_without_torch():
    program = "import sys, tilescale_net.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr


def test_run_takes_the_launchers_variables_as_flags(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['VIRTUAL_NODES'], sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "tilescale_net", "run", "-n", "2", "--virtual-nodes", "2", str(script), "-n", "5"]
    env = {"PATH": "/usr/bin:/bin", "TSN_DEVICE": "simulator", "PYTHONPATH": cli.__file__.rsplit("/tilescale_net/")[0]}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 2 2 ['-n', '5']\n"), done.stderr
    empty = subprocess.run([*command[:5], "", *command[6:]], env=env, capture_output=True, text=True)
    assert empty.returncode == 0, empty.stderr  # as an empty variable: the default
    refused = subprocess.run([*command[:5], "0", str(script)], env=env, capture_output=True, text=True)
    assert refused.returncode == 2 and "tilescale_net run: --ranks=0 is below the minimum of 1" in refused.stderr


def test_bench_writes_a_page(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "tilescale_net", "bench", "--quick", "--output", str(page)]
    env = {**os.environ, "TSN_DEVICE": "simulator"}
    done = subprocess.run([*command, "--only", "put_signal,launch_cost"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "launch_cost: not measured; it needs a GPU" in done.stdout and "1 of 2 benchmarks" in done.stdout
    text = page.read_text()
    assert "| put_signal (us) |" in text and "it needs a GPU" in text
    plot = re.search(r"!\[put_signal\]\((.*)\)", text)
    assert "<svg" in (page.parent / plot[1]).read_text()
    wrong = subprocess.run([*command, "--only", "put_sgnal"], env=env, capture_output=True, text=True)
    assert wrong.returncode == 2 and "'put_sgnal' is not one of all_gather, " in wrong.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--output", "/nonexistent/page.md"), "'/nonexistent/page.md' cannot be written"),
        (("-n", "0"), "0 is not a whole number of 1 or more"),
        (("--qiuck",), "tilescale_net bench: error: unrecognized arguments: --qiuck; did you mean --quick?"),
    ],
)
def test_bench_refuses_before_it_measures(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_keeps_its_results(tmp_path, monkeypatch, number, code):
    from benchmark.common import suite

    row = {"schema": 1, "command": ["slow.py"], "environment": {}, "notes": []}
    row["tables"] = [
        {"name": "t", "keys": [], "columns": [{"key": "a", "title": "A"}], "rows": [{"a": 41}], "notes": []}
    ]
    folder, page, measured = tmp_path / "benchmark", tmp_path / "page.md", tmp_path / "measured"
    folder.mkdir()
    (folder / "absent.py").write_text("BENCH = dict(gpu=True)\n")
    (folder / "slow.py").write_text(
        "import json, pathlib, sys, time\nBENCH = dict(ranks=1)\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text({json.dumps(row)!r})\n"
        f"pathlib.Path({str(measured)!r}).touch()\ntime.sleep(20)\n"
    )
    monkeypatch.setattr(suite, "FOLDER", folder)
    monkeypatch.setattr(suite, "TERM_TIMEOUT_S", 0.1)  # as Ctrl-C of a terminal would, nothing interrupts the launcher
    monkeypatch.setenv("TSN_DEVICE", "simulator")
    # As in a program of its own: what other tests of this process have done to the signal does not count.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])

    def end_it():
        while not measured.exists():
            time.sleep(0.01)
        assert "it needs a GPU" in page.read_text()  # the first one's place on the page is there already
        # Another thread of this process might take it otherwise, and the main one would wait on.
        signal.pthread_kill(threading.main_thread().ident, number)

    thread = threading.Thread(target=end_it)
    thread.start()
    assert cli.main(["bench", "--output", str(page)]) == code
    thread.join()
    assert "| 41 |" in page.read_text() and "interrupted" in page.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["benchmark", "measured", "page.md"]


def test_the_suite_knows_every_benchmark():
    from benchmark.common import suite

    files = {path.stem for path in suite.FOLDER.glob("*.py")} - {"__init__", "eight"}  # which runs others
    assert {entry.name for entry in suite.entries()} == files


# -- precompile -------------------------------------------------------------------------------------------------------

LAYER = dict(object="AllToAll", ranks=2, num_experts=4, max_tokens=16, hidden=128, top_k=2)


def _precompile(folder, listed, *more):
    (folder / "list.json").write_text(listed if isinstance(listed, str) else json.dumps(listed))
    return cli.main(["precompile", str(folder / "list.json"), "--output", str(folder / "out"), *more])


@pytest.fixture
def asked(monkeypatch):
    """The kernels that are asked for, none of which is compiled."""
    found = []

    def noted(factory, args, kwargs, target):
        found.append((factory.__name__, args, kwargs, target))
        return object()

    monkeypatch.setattr(jit.KernelFactory, "cached_for_gpu", noted)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    return found


def test_precompile_asks_for_every_kernel_once(asked, tmp_path, capsys):
    both = [LAYER, LAYER, dict(LAYER, object="deep_ep.low_latency"), dict(LAYER, nodes=2, ranks=4)]
    assert _precompile(tmp_path, both, "--arch", "sm_100a", "--sms", "148", "--jobs", "2") == 0
    names = [name for name, *_ in asked]
    assert len({str(call) for call in asked}) == len(asked) and names.count("exchange_weights") == 1
    assert {"plan_routing", "dispatch_throughput", "combine_throughput", "plan_nodes", "exchange_weights"} <= {*names}
    assert {str(target) for *_, target in asked} == {str({"kind": "cuda", "arch": "sm_100a"})}
    assert 148 in next(args for name, args, *_ in asked if name == "dispatch_latency"), "blocks"
    said = capsys.readouterr().out
    assert f"1 of {len(asked)}: " in said and f"TSN_KERNELS={tmp_path / 'out'}" in said


@pytest.mark.parametrize(
    "listed, said",
    [
        ("[", "is no JSON"),
        ({}, "must hold a list of objects"),
        ([dict(LAYER, object="Ring")], "object 1: object is 'Ring'; it must be AllToAll, deep_ep.low_latency or"),
        ([LAYER, dict(LAYER, dtype="int8")], "object 2: dtype is 'int8'"),
        ([dict(LAYER, num_experts=3)], "num_experts is 3; it must be a multiple"),
        ([dict(object="AllToAll", ranks=2)], "missing"),
        ([dict(ranks=2)], "'object' is missing"),
        ([dict(LAYER, tuning={"speed": 1})], "speed"),
    ],
)
def test_precompile_names_mistakes_in_a_list(asked, tmp_path, capsys, listed, said):
    assert _precompile(tmp_path, listed) == 2
    assert said in capsys.readouterr().err and not asked


def test_precompile_compiles_the_kernels_of_a_folder(asked, tmp_path, capsys):
    def file(name, made_by):
        text = json.dumps({"made_by": made_by}).encode()
        (tmp_path / name).write_bytes(b"library" + text + len(text).to_bytes(8, "little"))
        cache.seal(tmp_path / name)

    assert cli.main(["precompile", "--like", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    file("a.so", ["tilescale_net.kernels.p2p:push", [64], {"threads": 32, "shape": [1, [2]]}])
    file("b.so", [])  # with arguments that have no text
    assert cli.main(["precompile", "--like", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    ((name, args, kwargs, _),) = asked
    assert (name, args, kwargs) == ("push", (64,), {"threads": 32, "shape": (1, (2,))})
    for factory in ("tilescale_net.kernels.p2p:absent", "os:system"):
        file("a.so", [factory, [], {}])
        assert cli.main(["precompile", "--like", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
        assert f"{factory}, which this version does not have" in capsys.readouterr().err
    (tmp_path / "a.so").write_bytes(b"cut")
    assert cli.main(["precompile", "--like", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_precompile_needs_something_to_compile(capsys):
    assert cli.main(["precompile"]) == 2
    assert "give a LIST" in capsys.readouterr().err
