"""An installation: its files, its metadata, and a tutorial that runs without the checkout."""

import email
import shutil
import sysconfig
import zipfile

import pytest

import tilescale_net
from tests.package.conftest import ROOT, add_extensions, copy_checkout, install, new_environment, run, tracked


def installed_files() -> set[str]:
    """What a wheel should hold: Python files of the package, headers that kernels are compiled with, the extensions, what
    the choice of fused GEMMs was measured to be."""
    names = {
        name.replace("kernels/", "tilescale_net/kernels/", 1) if name.startswith("kernels/") else name
        for name in tracked()
    }
    inside = {name for name in names if name.startswith("tilescale_net/")}
    wanted = {n for n in inside if n.endswith((".py", "/measured.json"))}
    wanted |= {n for n in inside if n.startswith("tilescale_net/device/") and n.endswith(".h")}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    wanted |= {n for n in inside if n.endswith(".pyi")}
    return wanted | {"tilescale_net/py.typed"} | {f"tilescale_net/{name}{suffix}" for name in ("_native", "_simulator")}


def test_a_wheel_holds_the_files_of_a_run_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        tops = {name.split("/")[0] for name in names}
        info = f"tilescale_net-{tilescale_net.__version__}.dist-info"
        assert tops == {"tilescale_net", info}
        found = {name for name in names if not name.startswith(info)}
        assert sorted(found - installed_files()) == [] and sorted(installed_files() - found) == []
        metadata = email.message_from_bytes(content.read(f"{info}/METADATA"))
        entry = content.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == tilescale_net.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata.get_all("Provides-Extra") == ["bench"]
    assert "tilescale_net = tilescale_net.cli:main" in entry


def test_a_source_distribution_holds_the_files_of_a_build(source):
    found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    native = {n for n in tracked() if n.startswith("tilescale_net/csrc/") and n.endswith((".h", ".cpp"))}
    wanted = {n for n in tracked() if n.startswith("kernels/") and n.endswith(".py")}
    wanted |= {n for n in installed_files() if not n.endswith(".so") and "/kernels/" not in n}
    wanted |= native | {"setup.py", "pyproject.toml", "LICENSE"}
    assert sorted(wanted - found) == []


@pytest.mark.timeout(400)
@pytest.mark.sample(0)
def test_a_tutorial_runs_from_the_wheel_alone(wheel, tmp_path):
    python = new_environment(tmp_path / "environment")
    install(python, wheel)
    work = tmp_path / "elsewhere"
    work.mkdir()
    # A folder of the user's with the name of one of ours is the user's.
    (work / "kernels").mkdir()
    (work / "kernels" / "__init__.py").write_text("mine = True\n")
    text = (ROOT / "docs/tutorials/01_put_signal.py").read_text()
    (work / "tutorial.py").write_text("import kernels\nassert kernels.mine\n" + text)
    where = run(python, "-c", "import tilescale_net.kernels.moe as m; print(m.__file__)", cwd=work).stdout
    assert where.startswith(str(tmp_path / "environment"))
    env = {"TSN_DEVICE": "simulator"}
    command = tmp_path / "environment" / "bin" / "tilescale_net"
    done = run(command, "run", "-n", "2", "tutorial.py", cwd=work, env=env)
    expected = (ROOT / "docs/tutorials/01_put_signal.expected.txt").read_text()
    assert done.stdout == expected.partition("\n")[2]
    done = run(python, "-m", "tilescale_net", "--version", cwd=work)
    assert done.stdout == f"tilescale_net {tilescale_net.__version__}\n"


@pytest.mark.sample(0)
def test_an_editable_installation_uses_the_checkout(tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    # Extensions are always compiled; here by a compiler that writes empty files in no time.
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : >"$2"; shift; done\n')
    compiler.chmod(0o755)
    python = new_environment(tmp_path / "environment")
    tools = {"CC": str(compiler), "CXX": str(compiler), "LDSHARED": str(compiler), "LDCXXSHARED": str(compiler)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tools.items():
            patch.setenv(name, value)
        install(python, "-e", checkout)
    add_extensions(checkout / "tilescale_net")
    program = (
        "import tilescale_net.kernels.all_gather as a, tilescale_net._native as n, importlib.util as u; "
        "print(a.__file__, n.__file__, u.find_spec('kernels'), u.find_spec('benchmark'))"
    )
    package = checkout / "tilescale_net"
    native = package / ("_native" + sysconfig.get_config_var("EXT_SUFFIX"))
    expected = f"{package}/kernels/all_gather.py {native} None None\n"
    assert run(python, "-c", program, cwd=tmp_path).stdout == expected
    shutil.rmtree(checkout)
