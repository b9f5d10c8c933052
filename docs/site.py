"""Pages of the documentation site that are made from files elsewhere: a hook of mkdocs, named in mkdocs.yml.

The README, CONTRIBUTING, CHANGELOG and SECURITY stand at the top of the checkout; tutorials are programs with what they
print beside them.
"""

import ast
import re
import shutil
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Page of the site <- file of the checkout.
TOP = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}


def on_startup(command, dirty):
    """Copy the package to where docstrings are read, with an `__init__.py` in kernels/: the reader skips folders without."""
    package = ROOT / "build" / "site-package" / "tilescale_net"
    shutil.rmtree(package, ignore_errors=True)
    skipped = shutil.ignore_patterns("*.so", "*.h", "csrc", "kernels", "__pycache__")
    shutil.copytree(ROOT / "tilescale_net", package, ignore=skipped)
    shutil.copytree(ROOT / "kernels", package / "kernels")
    (package / "kernels" / "__init__.py").touch()


def moved_links(text: str) -> str:
    """Links as they are from the top of the site; those to files that are no pages lose their target."""
    for page, source in TOP.items():
        text = text.replace(f"]({source})", f"]({page})")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^\]]+)\]\(CITATION\.cff\)", r"`\1`", text)


def tutorial(program: Path) -> str:
    """A page: the program's docstring as prose, the program, its output."""
    text = program.read_text()
    words = ast.get_docstring(ast.parse(text))
    first, _, rest = words.partition("\n")
    code = text.split('"""', 2)[2].lstrip("\n")
    output = program.with_suffix(".expected.txt").read_text()
    return f"# {first}\n{rest}\n\n## The program\n```python\n{code}```\n\n## What it prints\n```text\n{output}```\n"


def on_files(files, config):
    """Add the pages to what mkdocs builds."""
    for page, source in TOP.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=moved_links((ROOT / source).read_text())))
    for program in sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.py")):
        page = f"tutorials/{program.stem}.md"
        files.append(File.generated(config, page, content=tutorial(program)))
    return files
