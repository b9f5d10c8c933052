"""Every public signature states its types: what `__all__` of a public module names, and methods of public classes."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator

import tilescale_net.kernels
from tilescale_net import errors
from tilescale_net.compiler.kernel import Kernel
from tilescale_net.kernels.collective import Collective
from tilescale_net.runtime.world import World

MODULES = (
    "tilescale_net",
    "tilescale_net.language",
    "tilescale_net.ops",
    "tilescale_net.tuning",
    "tilescale_net.deep_ep",
)
MODULES += ("tilescale_net.kernels.moe",)


def lacking(function: Callable) -> list[str]:
    """Parameters without an annotation, and "return"."""
    signature = inspect.signature(function)
    own = [p for i, p in enumerate(signature.parameters.values()) if i or p.name not in ("self", "cls")]
    found = [p.name for p in own if p.annotation is p.empty]
    says = signature.return_annotation is not signature.empty or function.__name__ == "__init__"
    return found if says else [*found, "return"]


def functions_of(thing: object) -> Iterator[Callable]:
    """A function, or the public methods and properties of a class."""
    if inspect.isclass(thing):
        for cls in thing.__mro__:
            if cls.__module__.startswith("tilescale_net"):
                for name, value in vars(cls).items():
                    value = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
                    if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
                        yield value
    elif inspect.isfunction(thing):
        yield thing


def host_classes(base: type = Collective) -> Iterator[type]:
    yield base
    for cls in base.__subclasses__():
        if cls.__module__.startswith("tilescale_net."):
            yield from host_classes(cls)


def test_host_classes_show_the_arguments_of_their_constructors():
    for cls in host_classes():
        assert list(inspect.signature(cls).parameters) == list(inspect.signature(cls.__init__).parameters)[1:], cls


def test_every_public_signature_is_annotated():
    for module in pkgutil.walk_packages(tilescale_net.kernels.__path__, "tilescale_net.kernels."):
        importlib.import_module(module.name)
    public = [getattr(module, name) for module in map(importlib.import_module, MODULES) for name in module.__all__]
    public += [*host_classes(), Kernel, World, *(value for value in vars(errors).values() if inspect.isclass(value))]
    functions = {function for thing in public for function in functions_of(thing)}
    assert len(functions) > 150
    found = {f"{f.__module__}.{f.__qualname__}": lacking(f) for f in functions}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_missing_annotations_are_found():
    def method(self, a: int, b, *rest): ...

    assert lacking(method) == ["b", "rest", "return"]
    assert [f.__name__ for f in functions_of(Collective)][0] == "__init__"


def test_completion_offers_public_names():
    offered = {name for name in dir(tilescale_net) if not name.startswith("__")}
    assert {"jit", "zeros", "StoreGroup", "errors", "kernels"} <= offered
    assert not offered & {"Any", "TYPE_CHECKING", "Sequence", "AbstractContextManager", "TypeAlias", "annotations"}
