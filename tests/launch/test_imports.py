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
