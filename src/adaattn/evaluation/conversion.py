"""A GGUF file turned into an ordinary Transformers folder that loads in seconds."""

import contextlib
import io
import platform
from pathlib import Path

from adaattn._packages import installed_version
from adaattn.errors import AssetError

__all__ = ["convert_gguf", "versions"]


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as float16 safetensors.

    The weights are de-quantised in fp32 first. Rounding them to float16 moves a token's loss
    by about 1e-5 of its value, far below what quantisation had already done.

    Args:
        source: the GGUF file.
        target: the folder to make.

    Raises:
        AssetError: Transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32
            )
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.hf_quantizer = None
            model.is_quantized = False
            model.to(torch.float16)
            model.config.dtype = torch.float16
            model.save_pretrained(str(target))
            tokenizer.save_pretrained(str(target))
    except (ImportError, ValueError, KeyError, RuntimeError) as error:
        raise AssetError.got(
            f"conversion of {name}",
            "a GGUF file that Transformers reads",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "run: pip install -U 'adaattn[hf]'",
        ) from error


def versions() -> dict[str, str]:
    """Return the versions that a conversion depends on."""
    packages = ("torch", "transformers", "gguf", "safetensors")
    found = {"python": platform.python_version(), **{p: installed_version(p) for p in packages}}
    return {name: version for name, version in found.items() if version}
