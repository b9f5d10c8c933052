"""Scripts that launch.sh starts can import the package, installed packages, and nothing of the checkout's top level."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.launch.conftest import ROOT, clean_environment, launch
from tilescale_net.runtime import this_host, world


def test_installed_packages_are_not_hidden_by_folders_of_the_checkout(script, tmp_path):
    for name in ("kernels", "benchmark", "docs"):
        (tmp_path / "installed" / name).mkdir(parents=True)
        (tmp_path / "installed" / name / "__init__.py").write_text("installed = True\n")
    text = """
        import benchmark, docs, kernels
        import tilescale_net, tilescale_net.launch.run as environment
        assert kernels.installed and benchmark.installed and docs.installed
        print(tilescale_net.__file__, tilescale_net.__name__, environment.__file__)
    """
    done = launch(script(text), GPUS="1", PYTHONPATH=str(tmp_path / "installed"))
    package = os.path.join(ROOT, "tilescale_net")
    assert done.stdout == f"{package}/__init__.py tilescale_net {package}/launch/run.py\n", done.stderr


def test_a_checkout_without_its_link_and_not_built(tmp_path):
    """The checkout of a zip, unpacked by a tool without symbolic links."""
    package = tmp_path / "tilescale_net"
    package.mkdir()
    for path in (Path(ROOT) / "tilescale_net").iterdir():
        if not path.name.startswith(("kernels", "_native", "_simulator")):
            (package / path.name).symlink_to(path)
    (package / "kernels").write_text("../kernels")
    for name in ("kernels", "setup.py", "pyproject.toml", "launch.sh", "README.md", "LICENSE"):
        (tmp_path / name).symlink_to(Path(ROOT) / name)
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, tilescale_net\nfound = importlib.util.find_spec('tilescale_net.kernels.collective')\n"
        "print(found.name)\ntilescale_net.init()"
    )
    env = clean_environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.stdout == "tilescale_net.kernels.collective\n"
    assert (
        f"the native part of tilescale_net is not built for Python 3.{sys.version_info.minor} in {package}"
        in done.stderr
    )


def test_ranks_can_import_tilelang_without_a_home(script, tmp_path):
    (tmp_path / "home").touch()
    env = {"HOME": str(tmp_path / "home"), "TILELANG_CACHE_DIR": "", "GPUS": "1"}
    done = launch(script("print(os.environ['TILELANG_CACHE_DIR'])"), **env)
    assert done.stdout.endswith(f"/tilescale_net-{os.getuid()}/tilelang\n"), done.stderr


def test_modules_can_be_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    done = launch("-m", "mine", "--flag", GPUS="1", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0 ['--flag']\n"), done.stderr


def test_benchmarks_import_one_another():
    done = launch(os.path.join(ROOT, "benchmark", "put_signal.py"), "--help", GPUS="1", PYTHONPATH="")
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_a_checkout_that_is_not_built(script, tmp_path, monkeypatch):
    """It is said before a rank starts, and by ranks of other launchers before they meet."""
    said = f"the native part of tilescale_net is not built for Python 3.{sys.version_info.minor} in "
    package = tmp_path / "checkout" / "tilescale_net"
    shutil.copytree(
        os.path.join(ROOT, "tilescale_net"), package, ignore=shutil.ignore_patterns("*.so", "csrc", "kernels")
    )
    done = subprocess.run(
        [sys.executable, str(package / "launch"), script("import tilescale_net")],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith(f"launch.sh: {said}") and not script.pids(), done
    monkeypatch.setattr(this_host, "NATIVE_MODULES", ("_nowhere",))
    assert str(world.check_settings()[0]).startswith(said)


def test_simulated_ranks_share_one_import_and_run_as_in_fresh_interpreters(script):
    # Seven ranks more cost less than one import of torch and tilelang, which takes some two seconds of a processor.
    text = """
        import random, resource
        import tilescale_net.language  # after it was imported, this costs nothing
        import __main__
        assert __main__.rank == rank and __main__.__file__ == sys.argv[0] and sys.argv[1:] == ["--flag"]
        used = resource.getrusage(resource.RUSAGE_SELF)
        assert used.ru_utime + used.ru_stime < 1, used
        open(os.path.join(os.path.dirname(sys.argv[0]), f"random{rank}"), "w").write(str(random.random()))
        def fails():
            raise ValueError("the reason")
        if rank == 5:
            time.sleep(1)
            fails()
        time.sleep(60)
    """
    path = script(text)
    done = launch(path, "--flag", GPUS="8", timeout=100)
    folder = os.path.dirname(path)
    drawn = {open(os.path.join(folder, f"random{rank}")).read() for rank in range(8)}
    assert len(drawn) == 8
    assert done.returncode == 1 and "rank 5 failed first: exit code 1; ValueError: the reason" in done.stderr
    trace = done.stderr[done.stderr.index("Traceback") : done.stderr.index("ValueError")]
    assert "in fails" in trace and "tilescale_net/launch" not in trace
