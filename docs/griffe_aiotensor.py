"""An extension of griffe, which reads the sources for the reference: it resolves what runs at import."""

import ast
from collections.abc import Iterator
from typing import Any

import griffe

_DECLARE = {"counter", "gauge", "Meta"}


class Completed(griffe.Extension):  # type: ignore[misc]
    """Describe the fields of statistics, and the parameters of blocking classes.

    The help text of a field is part of its annotation, as in ``Annotated[int, gauge("Open senders.")]``. A
    blocking class takes its parameters from another class, with the decorator `parameters_of`.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete the objects of the package."""
        for kind in _classes(pkg["types"]):
            for field in kind.attributes.values():
                if field.docstring is None and field.annotation is not None:
                    _describe(field, str(field.annotation), pkg)
        for kind in _classes(pkg["blocking"]):
            init = kind.members.get("__init__")
            for decorator in init.decorators if isinstance(init, griffe.Function) else []:
                called = ast.parse(str(decorator.value), mode="eval").body
                if isinstance(called, ast.Call) and ast.unparse(called.func) == "parameters_of":
                    given = called.args[0]  # perhaps with a type parameter
                    given = given.value if isinstance(given, ast.Subscript) else given
                    module, _, name = ast.unparse(given).rpartition(".")
                    of = pkg if module == pkg.name else pkg[module]
                    kind.members["__init__"].parameters = of[name].parameters


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for each in [module, *module.modules.values()]:
        yield from (member for member in each.members.values() if isinstance(member, griffe.Class))


def _describe(field: griffe.Attribute, annotation: str, pkg: griffe.Module) -> None:
    """Move the help text of a field from its annotation, or from the alias in it, to its docstring."""
    types = pkg["types"]
    if annotation in types.attributes:
        annotation = str(types[annotation].value)
    declared = ast.parse(annotation, mode="eval").body
    if not isinstance(declared, ast.Subscript) or not isinstance(declared.slice, ast.Tuple):
        return
    kind, *others = declared.slice.elts
    for call in others:
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _DECLARE:
            texts = [*call.args, *(word.value for word in call.keywords if word.arg == "description")]
            if texts and isinstance(texts[0], ast.Constant):
                field.docstring = griffe.Docstring(str(texts[0].value), parent=field)
                field.annotation = ast.unparse(kind)
