"""Translates generated CUDA source to a C++17 translation unit, from which the host's compiler makes a simulated
kernel.

tilelang's own headers need nvcc; `device/host` replaces them for kernels without tensor cores. The source stays
unchanged except for declarations specific to nvcc: shared memory, and the kernels' signatures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tilescale_net.compiler.operators import OPERATORS
from tilescale_net.errors import SimulatorUnsupported

# The first lines of every translation unit, equal for all so that precompiled headers work.
PRELUDE = '#include "host/kernel.h"\n#include "tilescale_net.h"\n'
# Constructs that fibers do not support, by their text in the source, and their names for authors.
_UNSUPPORTED = (
    (r"\btl::(?:mma_sync\w*|gemm\w*|mma_sp\w*|sm120_\w+)\b", "tensor-core matrix products (T.gemm)"),
    (r"\b(?:tl::)?w(?:ar)?pgroup_\w+|\btl::wgmma\w*|\btl::wait_wgmma\b", "warp-group matrix products (wgmma)"),
    (r"\btl::tcgen05\w*|\btl::tmem_\w+", "tensor memory (tcgen05)"),
    (r"\bCUtensorMap\b|\btl::tma_\w+|\btl::prefetch_tma_descriptor\b", "tensor memory accelerator copies (TMA)"),
    (r"\btl::(?:cp_async|mbarrier|fence_proxy)\w*", "asynchronous copies"),
    (r"\btl::ptx_(?:ld|st)matrix\w*", "ldmatrix and stmatrix"),
    (r"\btl::(?:cluster_\w+|clc_\w+|block_rank_in_cluster)\b", "thread block clusters"),
    (r"\bcurand\w*", "cuRAND"),
    (r"\bfp4_e2m1\w*|\b__nv_fp4\w*", "fp4 numbers"),
    (r"\b(?:__asm__|asm)\b", "inline PTX (asm)"),
)
# Includes replaced by the host's own headers.
_DROPPED = re.compile(
    r'^\s*#\s*include\s*[<"](?:tl_templates/|cutlass/|cute/|cuda/|cuda\.h|cuda_\w+\.h|math_constants\.h|'
    r'cooperative_groups\.h|tilescale_net\.h)[^>"]*[>"].*$',
    re.MULTILINE,
)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)\s*([;{])'
)
_POINTER = re.compile(r"^(const\s+)?([\w:]+(?:\s+[\w:]+)?)\s*\*\s*(?:__restrict__\s+)?(\w+)$")
_VALUE = re.compile(r"^(?:const\s+)?([\w:]+(?:\s+[\w:]+)*)\s+(\w+)$")
_DYNAMIC_SHARED = re.compile(
    r"^(\s*)extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+(?:\s+[\w:]+)?)\s+(\w+)\[\];", re.MULTILINE
)
# Variables at an offset in a kernel's common dynamic shared memory.
_SHARED_PART = re.compile(r"\bvoid\* (\w+) = \(\(void\*\)\(\(char\*\)\w+ \+ \d+\)\);")
_STATIC_SHARED = re.compile(
    r"^(\s*)__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+(?:\s+[\w:]+)?)\s+(\w+)((?:\[[^\]]*\])+)\s*;", re.MULTILINE
)


# T.use_swizzle: the kernel's own order of blocks, named like the built-in variable.
_SWIZZLE = re.compile(r"\bconst dim3 blockIdx = (tl::rasterization\w+<[^>]*>\(\));")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its name, its C++ type (of the elements, for a pointer), and whether it is a pointer."""

    name: str
    ctype: str
    pointer: bool
    const: bool = False


@dataclass(frozen=True)
class HostSource:
    """A translation unit and the kernels in it. `text`: C++17 source. `kernels`: parameters of each kernel, by name.
    `dynamic_shared`: names of kernels that use dynamic shared memory."""

    text: str
    kernels: dict[str, tuple[Parameter, ...]]
    dynamic_shared: frozenset[str]

    def fields(self) -> dict[str, Any]:
        """The argument of `from_fields`, for JSON."""
        kernels = {name: [list(vars(p).values()) for p in listed] for name, listed in self.kernels.items()}
        return {"text": self.text, "kernels": kernels, "dynamic_shared": sorted(self.dynamic_shared)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> HostSource:
        """Raises KeyError or TypeError unless `fields` made it."""
        if not isinstance(fields, dict) or not isinstance(fields["kernels"], dict):
            raise TypeError("it has no kernels")
        kernels = {name: tuple(Parameter(*p) for p in listed) for name, listed in fields["kernels"].items()}
        return cls(fields["text"], kernels, frozenset(fields["dynamic_shared"]))


def check_supported(name: str, source: str) -> None:
    """Raise SimulatorUnsupported that names every construct of `source` that the simulator cannot run."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|#\s*include[^\n]*", " ", source, flags=re.DOTALL)
    found = []
    for pattern, what in _UNSUPPORTED:
        match = re.search(pattern, code)
        if match:
            found.append(f"{what}: {match.group(0)}")
    if found:
        raise SimulatorUnsupported(
            f"kernel {name}: the simulator cannot run {'; '.join(found)}. Run this kernel on a GPU, or keep that part "
            "out of it in the simulator"
        )


def _parameter(kernel: str, text: str) -> Parameter:
    text = " ".join(text.split())
    match = _POINTER.match(text)
    if match:
        return Parameter(match.group(3), match.group(2), True, bool(match.group(1)))
    match = _VALUE.match(text)
    if match:
        return Parameter(match.group(2), match.group(1), False)
    raise SimulatorUnsupported(f"kernel {kernel}: the simulator does not know parameters such as `{text}`")


def _body(source: str, start: int) -> str:
    """The text of a function whose `{` is at `start`."""
    depth = 0
    for i in range(start, len(source)):
        depth += (source[i] == "{") - (source[i] == "}")
        if depth == 0:
            return source[start : i + 1]
    return source[start:]


def translate(name: str, source: str) -> HostSource:
    """Make a host translation unit of tilelang's `kernel_source`. `name`: the kernel's name, for errors. `source`: CUDA
    source generated for an architecture without asynchronous copies, such as sm_70. Raises SimulatorUnsupported: the
    source uses constructs that the simulator cannot run."""
    check_supported(name, source)
    text = _DROPPED.sub("", source)
    kernels: dict[str, tuple[Parameter, ...]] = {}
    shared = set()
    out, at = [], 0
    for match in _KERNEL.finditer(text):
        out.append(text[at : match.start()])
        at = match.end()
        if match.group(3) == ";":
            continue
        kernel = match.group(1)
        listed = match.group(2).strip()
        parameters = tuple(_parameter(kernel, p) for p in listed.split(",")) if listed else ()
        kernels[kernel] = parameters
        body = _body(text, match.end() - 1)
        at = match.end() - 1 + len(body)
        if _DYNAMIC_SHARED.search(body):
            shared.add(kernel)
        out.append(_define(kernel, parameters, body))
    out.append(text[at:])
    text = "".join(out)
    if not kernels:
        raise SimulatorUnsupported(f"kernel {name}: the generated source holds no kernel")
    text = _DYNAMIC_SHARED.sub(r"\1\2* \3 = static_cast<\2*>(tsn::sim::self().dynamic_shared);", text)
    count = iter(range(1 << 20))
    text = _STATIC_SHARED.sub(
        lambda m: f"{m[1]}auto& {m[3]} = tsn::sim::static_shared<{m[2]}{m[4]}>({next(count)});", text
    )
    return HostSource(PRELUDE + text, kernels, frozenset(shared))


def _rename_block_index(body: str) -> str:
    """`blockIdx` is a macro here: rename a variable of that name from its declaration on."""
    match = _SWIZZLE.search(body)
    if match is None:
        return body
    rest = re.sub(r"\bblockIdx\b", "tsn_block_idx", body[match.end() :])
    return f"{body[: match.start()]}const dim3 tsn_block_idx = {match[1]};{rest}"


def _leave_addresses(body: str, checked: str) -> str:
    """The address of an element is no access, and may lie one past the end; atomics report their own accesses."""
    return re.sub(
        rf"(\bAtomic\w+\()?(\(*)&\(({checked})\[",
        lambda m: f"{m[1] or ''}{m[2]}&({m[3]}.{'atomically' if m[1] else 'unchecked'}()[",
        body,
    )


def _follow_shared(body: str) -> tuple[str, list[str]]:
    """Make variables in dynamic shared memory report accesses; returns patterns of their elements, too."""
    elements = []
    whole = _DYNAMIC_SHARED.search(body)
    if whole is not None:
        name, pointer = whole[3], "tsn::sim::self().dynamic_shared"
        body = (
            f'{body[: whole.start()]}{whole[1]}tsn::sim::SharedBytes {name}("{name}", {pointer});{body[whole.end() :]}'
        )
        cast = rf"\(\(((?:const )?(?:unsigned )?[\w:]+)\*\){name}\)"
        body = re.sub(cast, rf"{name}.as<\1>()", body)
        body = re.sub(rf"(?<!SharedBytes )\b{name}(?= ?[\[+])(?! \+ \d+\)\);)", f"{name}.as<{whole[2]}>()", body)
        elements.append(rf"{name}\.as<[\w: ]+>\(\)")
    for match in _SHARED_PART.finditer(body):
        elements.append(rf"{match[1]}\.as<[\w: ]+>\(\)")
    body = _SHARED_PART.sub(lambda m: f'tsn::sim::SharedBytes {m[1]}("{m[1]}", {m[0].split(" = ", 1)[1][:-1]});', body)
    for name in re.findall(r'tsn::sim::SharedBytes (\w+)\("', body):
        body = re.sub(rf"\(\(((?:const )?(?:unsigned )?[\w:]+)\*\){name}\)", rf"{name}.as<\1>()", body)
    for element in elements:
        body = _leave_addresses(body, element)
    return body, elements


def _arguments(text: str, start: int) -> tuple[list[str], int]:
    """Arguments of the call whose `(` is at `start`, and the index behind its `)`."""
    depth, begin, found = 0, start + 1, []
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if (depth == 1 and text[i] == ",") or depth == 0:
            found.append(text[begin:i].strip())
            begin = i + 1
        if depth == 0:
            return found, i + 1
    return found, len(text)


def _check_views(body: str, pointers: set[str]) -> str:
    """Give pointers made by `tsn::remote` the bounds of the peer's tensor."""
    made = re.compile(r"void\* (\w+) = (?:/\*@(\d+)\*/)?tsn::remote\(")
    match = made.search(body)
    while match:
        name = match.group(1)
        arguments, end = _arguments(body, match.end() - 1)
        source = re.fullmatch(r"\(&\((\w+)\[(.*)\]\)\)", arguments[1], re.DOTALL)
        rest = f"{source[1]}.rest({source[2]})" if source and source[1] in pointers else "~0ull"
        call = f"tsn::remote({', '.join(arguments)})"
        if match[2]:
            call = f"(tsn::sim::At({match[2]}, true), {call})"
        view = f'tsn::sim::View {name}("{name} (remote view{" of " + source[1] if source else ""})", {call}, {rest})'
        # The generated code writes elements of the view as ((T*)name).
        tail = re.sub(rf"\(\(((?:const )?[\w:]+)\*\){name}\)", rf"{name}.as<\1>()", body[end:])
        tail = _leave_addresses(tail, rf"{name}\.as<[\w: ]+>\(\)")
        body = body[: match.start()] + view + tail
        match = made.search(body, match.start() + len(view))
    return body


_CALL = re.compile(r"(?:/\*@(\d+)\*/)?\btsn::(\w+)((?:<[^()]*?>)?)\(")
_ELEMENT = re.compile(r"((?:reinterpret_cast<[\w:]+\*>\()?)\(&\((\w+)\[(.*)\]\)\)(\)?)", re.DOTALL)


def _check_calls(body: str, pointers: set[str]) -> str:
    """Pass each primitive's source line to the simulator, and check its ranges against its tensors."""
    for match in reversed(list(_CALL.finditer(body))):
        site, name, template = match.groups()
        accessed = OPERATORS[name].accessed if name in OPERATORS else []
        if not accessed and site is None:
            continue
        arguments, end = _arguments(body, match.end() - 1)
        for position, sized_by in accessed:
            element = _ELEMENT.fullmatch(arguments[position])
            if element is None or element[2] not in pointers:
                continue
            size = arguments[sized_by] if sized_by is not None else f"sizeof(*{element[2]}.unchecked())"
            primitive = name.removesuffix("_shared")
            arguments[position] = f'{element[1]}{element[2]}.span({element[3]}, {size}, "{primitive}"){element[4]}'
        call = f"tsn::{name}{template}({', '.join(arguments)})"
        if site:
            before = body[body.rfind("\n", 0, match.start()) + 1 : match.start()]
            alone = not before.strip() and body[end : end + 1] == ";"
            call = f"(tsn::sim::At({site}, {'false' if alone else 'true'}), {call})"
        body = body[: match.start()] + call + body[end:]
    return body


def _note_stores(body: str, elements: list[str]) -> str:
    """Mark plain stores to tensors: statements that begin with an element, or with a vector of elements. `elements`:
    patterns of the text before an index."""
    if not elements:
        return body
    names = "|".join(elements)
    store = re.compile(rf"^(\s*)(?:\*\(((?:unsigned )?[\w:]+)\*\)\(({names}) \+ |({names})\[)", re.MULTILINE)
    for match in reversed(list(store.finditer(body))):
        vector = match[2] is not None
        begin = match.end() - 1 if not vector else body.index("(", match.start(3) - 1)
        inside, end = _arguments(body, begin)
        if len(inside) != 1 or not re.match(r"\s*=[^=]", body[end:]):
            continue
        if vector:
            index = inside[0].split(" + ", 1)[1]
            body = f"{body[: match.start()]}{match[1]}{match[3]}.stored_as<{match[2]}>({index}){body[end:]}"
        else:
            body = f"{body[: match.start()]}{match[1]}{match[4]}.stored({inside[0]}){body[end:]}"
    return body


_FUNCTION = re.compile(
    r"(?<![\w:.>])(?<![\w>] )((?!tsn_|__|Atomic|if\b|for\b|while\b|return\b|sizeof\b)[A-Za-z_]\w*)\("
)


def _note_pointers(body: str) -> str:
    """Report calls of functions that take the address of an element: their accesses are invisible to the simulator."""
    for match in reversed(list(_FUNCTION.finditer(body))):
        arguments, end = _arguments(body, match.end() - 1)
        if any(".unchecked()[" in argument for argument in arguments):
            call = body[match.start() : end]
            body = f"{body[: match.start()]}(tsn::sim::api().remote->hands_pointer(), {call}){body[end:]}"
    return body


# A loop that loads a word until a condition holds of it, and does nothing else; the first load may stand before it.
# Choices of numbers may stand between a load and its comparison.
_FIND = (
    r"([\w ]+?) (\w+) = ((?:/\*@\d+\*/tsn::ld<(?!tsn::Order::weak)[^()]*?>|AtomicLoad)\(.*\));\n"
    r"((?: *(?:\w+ condval\w*;|if \(.*\) \{|condval\w* = .*;|\} else \{|\})\n)*) *(\w+)(\[0\])? = (.*);\n"
)
_POLL = re.compile(
    rf"^(?: *{_FIND})?( *)while \(1\) \{{\n *if \(!(\(.*\))\) \{{ break; \}}\n *{_FIND}"
    r"(?: *if \(\(bool\)\w+\) \{\n *tsn_sim_line\(\d+\);\n *\}\n)?\8\}\n",
    re.MULTILINE,
)


def _note_polls(body: str) -> str:
    """Tell the simulator by which values of its word such a loop ends, if the loop alone reads the word."""

    def noted(match: re.Match[str]) -> str:
        whole, goes_on, name = match[0], match[9], match[14]
        elsewhere = re.sub(rf"\n *{name}(?:\[0\])? = (?:\(signed char\))?\d+;", "", body.replace(whole, ""))
        if len(re.findall(rf"\b{name}\b", elsewhere)) > 1:
            return match[0]
        for first in (1, 10):
            ctype, word, load, choices, _, element, found = match.groups()[first - 1 : first + 6]
            if load is None:
                continue
            compared = f"{goes_on}{choices}{found}".replace("(&(ctx[0]))", "").replace(f"{name}[0]", name)
            integer = re.fullmatch(r"u?int(?:(?:32|64)_t)?|unsigned|(?:unsigned |long )*(?:int|long)", ctype)
            if "[" in compared or "/*@" in compared or not integer:
                return match[0]
            value = f"{ctype} {name}[1] = {{{found}}}" if element else f"const auto {name} = {found}"
            condition = f"[&]({ctype} {word}) {{\n{choices}{value}; return bool({goes_on}); }}"
            whole = whole.replace(
                f"{word} = {load};", f"{word} = tsn::sim::poll([&] {{ return {load}; }}, {condition});"
            )
        return whole

    return _POLL.sub(noted, body) if "while (1)" in body else body


def _define(kernel: str, parameters: tuple[Parameter, ...], body: str) -> str:
    """The kernel as a host function with checked pointers, and the function that the simulator calls per thread."""
    declared, passed = [], []
    pointers = {p.name for p in parameters if p.pointer and p.ctype != "void"}
    body = _check_views(_note_polls(_rename_block_index(body)), pointers)
    if "tsn::" in body:
        body = _check_calls(body, pointers)
    body, shared = _follow_shared(body)
    views = [rf"{view}\.as<[\w: ]+>\(\)" for view in re.findall(r"tsn::sim::View (\w+)\(", body)]
    body = _note_stores(body, [*map(re.escape, sorted(pointers)), *shared, *views])
    for i, p in enumerate(parameters):
        if p.pointer and p.ctype != "void":
            const = "const " if p.const else ""
            declared.append(f"tsn::sim::Checked<{const}{p.ctype}> {p.name}")
            passed.append(f'{{"{p.name}", a[{2 * i}], a[{2 * i + 1}]}}')
            body = _leave_addresses(body, re.escape(p.name))
        elif p.pointer:
            declared.append(f"{'const ' if p.const else ''}void* {p.name}")
            passed.append(f"reinterpret_cast<void*>(a[{2 * i}])")
        else:
            declared.append(f"{p.ctype} {p.name}")
            passed.append(f"tsn_from_word<{p.ctype}>(a[{2 * i}])")
    body = _note_pointers(body)
    entry = (
        f'extern "C" __attribute__((visibility("default"))) void tsn_sim_entry_{kernel}(const uint64_t* a) {{\n'
        f"  (void)a;\n  {kernel}({', '.join(passed)});\n}}\n"
    )
    return f"static void {kernel}({', '.join(declared)}) {body}\n\n{entry}"
