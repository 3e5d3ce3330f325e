"""Writes the API pages while Sphinx reads them, so that they cannot be older than the code.

A page in ``docs/api/`` has comment lines of two kinds, which become text here:

    <!-- names of adaattn -->     a table of the names that a module gives, each with a link
    <!-- modules of adaattn.spec -->   the module and each public module inside it, in full

Each name is described once, in the module that defines it; elsewhere it is a link. A name whose
own module is private is described in the innermost public module that gives it.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_MARKER = re.compile(r"^<!-- (names|modules) of ([\w.]+) -->$", re.MULTILINE)


def expand(text: str) -> str:
    """Return a page with its comment lines replaced."""
    writers = {"names": names_of, "modules": modules_of}
    return _MARKER.sub(lambda found: writers[found[1]](found[2]), text)


def names_of(module: str) -> str:
    """Return a table: each public name, where it is described, the first line of that."""
    lines = ["| name | what it is |", "|---|---|"]
    found = importlib.import_module(module)
    for name in _names(found):
        thing = getattr(found, name)
        home = home_of(found, name)
        target = home if inspect.ismodule(thing) else f"{home}.{name}"
        label = f"{module}.{name}"
        lines.append(f"| {{py:obj}}`{label} <{target}>` | {_first_line(thing)} |")
    return "\n".join(lines)


def modules_of(module: str) -> str:
    """Return a section for the module and for each public module inside it."""
    return "\n\n".join(_section(name) for name in public_modules(module))


def public_modules(name: str) -> Iterator[str]:
    """Yield a module's name and those of all public modules inside it, in order."""
    yield name
    found = importlib.import_module(name)
    inside = pkgutil.iter_modules(getattr(found, "__path__", []), f"{name}.")
    for item in sorted(inside, key=lambda item: item.name):
        if not item.name.rpartition(".")[2].startswith("_"):
            yield from public_modules(item.name)


def home_of(module: ModuleType, name: str) -> str:
    """Return the public module that describes a name of ``module``."""
    thing = getattr(module, name)
    if inspect.ismodule(thing):
        return thing.__name__
    home = getattr(thing, "__module__", None)
    if not isinstance(home, str) or not home.startswith("adaattn"):
        return _defined_in(module, name)
    is_private = any(part.startswith("_") for part in home.split("."))
    return _given_by(name, thing) if is_private else home


def _given_by(name: str, thing: Any) -> str:
    """Return the innermost public module that gives something whose own module is private."""
    givers = [
        found
        for found in public_modules("adaattn")
        if name in _names(module := importlib.import_module(found))
        and getattr(module, name) is thing
    ]
    return max(givers, key=lambda found: found.count("."))


def _defined_in(module: ModuleType, name: str) -> str:
    """Return where a value without a module of its own is assigned, a constant for example."""
    for found in public_modules("adaattn"):
        source = inspect.getsource(importlib.import_module(found))
        if re.search(rf"^{re.escape(name)}\b[^=\n]* = ", source, re.MULTILINE) and (
            getattr(importlib.import_module(found), name, None) is getattr(module, name)
        ):
            return found
    return module.__name__


def _section(module: str) -> str:
    """Return the heading, the docstring, what is described here, and what is only named."""
    found = importlib.import_module(module)
    names = [name for name in _names(found) if not inspect.ismodule(getattr(found, name))]
    here = [name for name in names if home_of(found, name) == module and not name.startswith("_")]
    lines = [f"## {module}", "", "```{eval-rst}", f".. automodule:: {module}"]
    described = [name for name in here if not _is_data(getattr(found, name))]
    if described:
        lines.append(f"   :members: {', '.join(described)}")
    for name in here:
        if name not in described:
            # As a member of its module, a value without a docstring would be left out.
            lines += ["", f".. autodata:: {module}.{name}", "   :no-value:"]
    lines.append("```")
    elsewhere = [
        f"{{py:obj}}`{name} <{home_of(found, name)}.{name}>`"
        for name in names
        if home_of(found, name) != module
    ]
    if elsewhere:
        lines += ["", f"Also here: {', '.join(elsewhere)}."]
    return "\n".join(lines)


def _names(module: ModuleType) -> list[str]:
    """Return a module's public names: those of ``__all__``, else those that it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    ]


def _is_data(thing: Any) -> bool:
    """Return whether a name stands for a value, whose docstring would be its type's."""
    return not (inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing))


def _first_line(thing: Any) -> str:
    """Return the first sentence of a docstring; of a value, what type it has."""
    if _is_data(thing):
        return f"a `{type(thing).__name__}`"
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return paragraph.replace("|", "\\|").replace("``", "`")


def _on_read(app: Any, name: str, source: list[str]) -> None:
    """Expand the page that Sphinx has just read."""
    source[0] = expand(source[0])


def _on_docstring(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Drop what is only the docstring of a value's type, and set formulas as literal blocks.

    A formula is an indented paragraph below a plain one.
    """
    if what == "data" and "\n".join(lines).strip() == (inspect.getdoc(type(thing)) or "").strip():
        lines[:] = [f"A ``{type(thing).__name__}``."]
    for number in range(len(lines) - 1, 0, -1):
        above = next((line for line in reversed(lines[:number]) if line.strip()), "")
        plain_above = bool(above) and not above.startswith(" ") and not above.endswith("::")
        if lines[number].startswith("    ") and not lines[number - 1].strip() and plain_above:
            lines[number:number] = ["::", ""]


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx, and say that pages may be read in parallel."""
    app.connect("source-read", _on_read)
    # Before napoleon, which listens at 500 and turns sections into other markup.
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)
    return {"parallel_read_safe": True}
