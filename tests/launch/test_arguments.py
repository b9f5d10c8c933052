"""launch.sh refuses wrong values, with exit code 2 and a message that names the value."""

import subprocess

import pytest

from tests.launch.conftest import ROOT, launch
from tilescale_net.launch import run


@pytest.mark.parametrize(
    "env, said",
    [
        ({"GPUS": "0"}, "GPUS=0 is below the minimum of 1"),
        ({"GPUS": "two"}, "GPUS='two' is not a whole number"),
        ({"GPUS": "1000"}, "GPUS=1000 is more than the 64 ranks"),
        ({"GPUS": "4", "VIRTUAL_NODES": "3"}, "VIRTUAL_NODES=3 does not divide GPUS=4"),
        (
            {"GPUS": "4", "VIRTUAL_NODES": "3+2"},
            "VIRTUAL_NODES=3+2 are 5 ranks, which are not GPUS=4; choose sizes whose sum is 4",
        ),
        ({"NODES": "2", "NODE_RANK": "0", "MASTER_PORT": "1234"}, "MASTER_ADDR must be set"),
        ({"NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not"),
        ({"NODES": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1234"}, "NODE_RANK must be set"),
        ({"NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "NODE_RANK=2 is not below NODES=2"),
        ({"MASTER_PORT": "70000", "NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "x"}, "MASTER_PORT=70000 is above"),
        ({"TSN_SEED": "5"}, "there is no setting TSN_SEED; did you mean TSN_SIM_SEED?"),
        ({"TSN_CHAOS": "banana=1"}, "TSN_CHAOS='banana=1': unknown field 'banana'"),
        (
            {"TSN_HEAP_SIZE": "100T"},
            "TSN_HEAP_SIZE: a heap of 109951162777600 bytes is more than this machine has memory",
        ),
    ],
)
def test_bad_environment(script, env, said):
    done = launch(script("print('ran')"), **env)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == "" and not script.pids()


def test_a_name_that_is_nearly_the_launchers(script):
    done = launch(script("print('ran')"), VIRTUAL_NODE="2", GPUS="1")
    assert done.stdout == "ran\n"
    assert done.stderr == "launch.sh: VIRTUAL_NODE has no meaning here; did you mean VIRTUAL_NODES?\n"


def test_bad_script():
    assert launch("no_such_file.py").returncode == 2
    assert "no script 'no_such_file.py'" in launch("no_such_file.py").stderr
    assert "neither a Python script" in launch("benchmark").stderr
    assert "GPUS=2 bash launch.sh script.py" in launch("--gpus", "2", "script.py").stderr
    assert launch().returncode == 2
    assert "usage" in launch().stderr
    assert launch("--help").returncode == 0


def test_a_checkout_that_python_cannot_register(script, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a:b"
    path.symlink_to(ROOT)
    for argument in (script(""), "pytest", "--setup-only"):
        done = subprocess.run(["bash", str(path / "launch.sh"), argument], capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and "has ':' in its name" in done.stderr and not script.pids()
    monkeypatch.setattr(run, "PACKAGE", path / "tilescale_net")
    with pytest.raises(SystemExit) as ended:
        run.start([script("")])
    assert ended.value.code == 2 and "has ':' in its name" in capsys.readouterr().err


def test_bad_interpreter(script):
    done = launch(script(""), TSN_PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "/nowhere/python" in done.stderr


def test_more_ranks_than_gpus(capsys, monkeypatch):
    check = run.check_ranks
    monkeypatch.delenv("TSN_DEVICE", raising=False)
    check(2, gpus=2)
    with pytest.raises(SystemExit) as ended:
        check(3, gpus=2)
    assert ended.value.code == 2
    assert "GPUS=3, but this machine shows 2 GPUs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check(65, gpus=0)
    check(2, gpus=0)
    monkeypatch.setenv("TSN_DEVICE", "cuda")
    with pytest.raises(SystemExit):
        check(2, gpus=0)
    assert "shows no GPU" in capsys.readouterr().err
