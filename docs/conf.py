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
# A signature has the types, one argument on a line where they are many; "Args" says what they mean.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
# Links to a section of another page.
myst_heading_anchors = 3
napoleon_google_docstring = True
# An "Attributes:" section then describes what the class has, instead of listing it twice.
napoleon_use_ivar = True
