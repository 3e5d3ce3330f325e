"""Sphinx settings: `make docs` builds this folder into build/docs, without the network.

No intersphinx: it would fetch other projects' inventories during the build.
"""

import sys
from pathlib import Path

import adaattn

sys.path.insert(0, str(Path(__file__).parent))

project = "AdaAttn"
author = "The AdaAttn developers"
release = adaattn.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "public_api"]
html_theme = "furo"
# Single backticks in docstrings are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Types stand beside the arguments that a docstring explains. Where a paragraph parts "Args" from
# "Raises", all types would otherwise be listed once more.
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
# An "Attributes:" section then describes what the class has, instead of listing it twice.
napoleon_use_ivar = True
