"""Sphinx settings: `make docs` builds this folder into build/docs."""

from importlib import metadata

project = "AdaAttn"
author = "The AdaAttn developers"
release = metadata.version("adaattn")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
