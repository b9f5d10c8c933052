"""Pages of the documentation site that are made from files elsewhere: a hook of mkdocs, named in mkdocs.yml.

The README, CONTRIBUTING, CHANGELOG and SECURITY stand at the top of the checkout; tutorials are programs with what they
print beside them.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import parameters

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


class Parameters(griffe.Extension):
    """Gives every docstring a row for each parameter, see parameters.py; named in mkdocs.yml."""

    def on_object(self, *, obj, **kwargs):
        known = parameters.index().get(obj.path)
        if known and obj.docstring and known.doc:
            obj.docstring.value = parameters.complete(known)


def on_config(config):
    """The version in the footer; "edit this page" where the repository has an address."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "tilescale_net" / "__init__.py").read_text())[1]
    config.copyright = f"tilescale_net {version}, Apache-2.0"
    if not config.repo_url:
        config.repo_url = config.edit_uri = None
    return config


def moved_links(text: str) -> str:
    """Links as they are from the top of the site; see `without_files`."""
    for page, source in TOP.items():
        text = text.replace(f"]({source})", f"]({page})")
    return without_files(re.sub(r"\]\(docs/", "](", text).replace('src="docs/', 'src="'))


def without_files(text: str) -> str:
    """Links to files of the checkout that are no pages lose their target."""
    files = r"(?:\.\./)*(?:CITATION\.cff|LICENSE|(?:examples|kernels|tests)/[^)]*)"
    return re.sub(rf"\[`?([^\]`]+)`?\]\({files}\)", r"`\1`", text)


def on_page_markdown(markdown, page, config, files):
    """Tutorials are pages here, and programs in the checkout; the README is the first page."""
    markdown = re.sub(r"\]\((?:\.\./)+README\.md", "](" + "../" * page.file.src_uri.count("/") + "index.md", markdown)
    return re.sub(r"(\]\([\w./]*\b\d\d_\w+)\.py\)", r"\1.md)", without_files(markdown))


def tutorial(program: Path) -> str:
    """A page: the program's docstring as prose, the program, its output."""
    text = program.read_text()
    words = ast.get_docstring(ast.parse(text))
    title, _, rest = re.sub(r"^\d+: ", "", words).partition(".")
    code = text.split('"""', 2)[2].lstrip("\n")
    output = program.with_suffix(".expected.txt").read_text()
    return f"# {title[0].upper()}{title[1:]}\n{rest.strip()}\n\n## The program\n```python\n{code}```\n\n## What it prints\n```text\n{output}```\n"


def edited(file: File, source: str) -> File:
    """A page that is made from a file of the checkout, which "edit this page" opens."""
    file.edit_uri = f"../{source}"
    return file


def on_files(files, config):
    """Add the pages to what mkdocs builds."""
    for page, source in TOP.items():
        if (ROOT / source).exists():
            files.append(edited(File.generated(config, page, content=moved_links((ROOT / source).read_text())), source))
    for program in sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.py")):
        page = f"tutorials/{program.stem}.md"
        source = f"docs/tutorials/{program.name}"
        files.append(edited(File.generated(config, page, content=tutorial(program)), source))
    return files
