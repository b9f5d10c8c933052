"""What scripts that launch.sh starts can import: the package, what is installed, and nothing of the checkout's top level."""

import os

from tests.launch.conftest import ROOT, launch


def test_installed_packages_are_not_hidden_by_folders_of_the_checkout(script, tmp_path):
    for name in ("kernels", "benchmark", "docs"):
        (tmp_path / "installed" / name).mkdir(parents=True)
        (tmp_path / "installed" / name / "__init__.py").write_text("installed = True\n")
    text = """
        import benchmark, docs, kernels
        import tilescale_net, tilescale_net.launch.environment as environment
        assert kernels.installed and benchmark.installed and docs.installed
        print(tilescale_net.__file__, tilescale_net.__name__, environment.__file__)
    """
    done = launch(script(text), GPUS="1", PYTHONPATH=str(tmp_path / "installed"))
    package = os.path.join(ROOT, "tilescale_net")
    assert done.stdout == f"{package}/__init__.py tilescale_net {package}/launch/environment.py\n", done.stderr


def test_modules_can_be_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    done = launch("-m", "mine", "--flag", GPUS="1", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0 ['--flag']\n"), done.stderr


def test_benchmarks_import_one_another():
    done = launch(os.path.join(ROOT, "benchmark", "put_signal.py"), "--help", GPUS="1", PYTHONPATH="")
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


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
