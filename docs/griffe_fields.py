"""An extension of griffe: the help texts of statistics, which are part of their annotations, become docstrings."""

import ast
from typing import Any

import griffe

_DECLARE = {"counter", "gauge", "Meta"}


class FieldTexts(griffe.Extension):
    """Move the text of ``Annotated[int, gauge("Senders that are connected.")]`` to the docstring of a field."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Take the text and the plain type from an annotation."""
        if not isinstance(node, ast.AnnAssign) or attr.docstring is not None:
            return
        declared = node.annotation
        if not isinstance(declared, ast.Subscript) or ast.unparse(declared.value) != "Annotated":
            return
        kind, *others = declared.slice.elts if isinstance(declared.slice, ast.Tuple) else []
        for call in others:
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _DECLARE:
                texts = [*call.args, *(word.value for word in call.keywords if word.arg == "description")]
                if texts and isinstance(texts[0], ast.Constant):
                    attr.docstring = griffe.Docstring(str(texts[0].value), parent=attr)
                    attr.annotation = ast.unparse(kind)
