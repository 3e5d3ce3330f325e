"""A model as a folder: ``config.json`` and ``model.safetensors``, written whole or not at all.

The weights carry the checksum of the config that they were written with, so that a save that
broke off between the two files, or files from two models, are noticed. Shared weights are
stored once, because a model has each of its tensors under one name only.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from adaattn._files import replace_file
from adaattn._packages import import_package
from adaattn.errors import ArgumentError, ArgumentTypeError, AssetError, ShapeError
from adaattn.models.config import TransformerConfig

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "check_tensors", "counted", "read_folder", "write_folder"]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_FORMAT = "adaattn.transformer"
_VERSION = 1
_CHECKSUM = "config_sha256"
_NAMED = 4
_AGAIN = "save the model again"


def write_folder(
    folder: str | os.PathLike[str],
    architecture: str,
    config: TransformerConfig,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write a model; what was there before stays until its successor is complete.

    Args:
        folder: made if it is not there; other files in it stay as they are.
        architecture: ``"decoder"`` or ``"encoder"``.
        config: the model's shape.
        tensors: its ``state_dict``.

    Raises:
        AssetError: the folder cannot be written, or safetensors is missing.
        ArgumentTypeError: ``attention_settings`` holds what JSON cannot say.
    """
    save_file = import_package("safetensors.torch").save_file
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "architecture": architecture,
        "config": config.to_dict(),
    }
    try:
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError.got(
            "attention_settings",
            "strings, finite numbers, booleans, lists and mappings",
            error,
            "a policy can be given by its name or its file",
        ) from error
    target = Path(folder)
    metadata = {_CHECKSUM: _sha256(text)}  # one entry: of several, the order would be random
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        replace_file(target / WEIGHTS_FILE, lambda path: save_file(stored, path, metadata))
        replace_file(target / CONFIG_FILE, lambda path: path.write_bytes(text.encode()))
    except OSError as error:
        raise AssetError.got(
            f"folder {target}", "a place that can be written", repr(error)
        ) from error


def read_folder(
    folder: str | os.PathLike[str], architecture: str, device: torch.device | str = "cpu"
) -> tuple[TransformerConfig, dict[str, torch.Tensor]]:
    """Return the config and the tensors that `write_folder` wrote.

    Args:
        folder: the folder.
        architecture: which one the caller wants.
        device: where the tensors go.

    Raises:
        AssetError: a file is missing, corrupt or foreign, of another architecture or of a later
            version, or the two are not of one save.
    """
    source = Path(folder)
    text = _read_config_text(source / CONFIG_FILE)
    config = _parse_config(source / CONFIG_FILE, text, architecture)
    tensors, metadata = _read_weights(source / WEIGHTS_FILE, device)
    if metadata.get(_CHECKSUM) != _sha256(text):
        raise AssetError.got(
            f"{source / WEIGHTS_FILE}",
            f"the weights that were saved with {CONFIG_FILE}",
            "others, or a config edited since",
            f"{_AGAIN}; a save that was broken off leaves this too",
        )
    return config, tensors


def check_tensors(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], subject: str
) -> None:
    """Refuse tensors whose names or shapes are not those wanted.

    Args:
        tensors: what was found.
        wanted: the model's own.
        subject: what a message calls the first.

    Raises:
        AssetError: names every difference, a few of each kind.
    """
    missing = [name for name in wanted if name not in tensors]
    surplus = [name for name in tensors if name not in wanted]
    shapes = [
        f"{name} {list(tensor.shape)} instead of {list(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems := counted(("no", missing), ("besides", surplus), ("shape", shapes)):
        raise AssetError.got(subject, "the tensors of this config", problems, _AGAIN)


def counted(*kinds: tuple[str, list[str]]) -> str:
    """Return what is wrong with tensors, in words; "" where nothing is.

    Args:
        *kinds: a word for each thing that may be wrong, and the names of the tensors.
    """
    return "; ".join(f"{word} {_few(names)}" for word, names in kinds if names)


def _few(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _sha256(text: str) -> str:
    """Return the checksum of a config's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _read_config_text(path: Path) -> str:
    """Return the text of a config file."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise AssetError.got(
            f"{path}", "a file written by save()", "no file", "check the folder's name"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise AssetError.got(f"{path}", "a readable text", repr(error), _AGAIN) from error


def _parse_config(path: Path, text: str, architecture: str) -> TransformerConfig:
    """Return the config in a text, checked."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AssetError.got(f"{path}", "JSON", error, _AGAIN) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        foreign = isinstance(data, dict) and "model_type" in data
        raise AssetError.got(
            f"{path}",
            f'an object with "format": "{_FORMAT}"',
            "a config of Transformers" if foreign else "another file",
            "convert it with adaattn.models.from_hugging_face" if foreign else "",
        )
    for name, wanted in (("version", _VERSION), ("architecture", architecture)):
        if data.get(name) != wanted:
            hint = "use the AdaAttn that wrote it" if name == "version" else "use the other class"
            raise AssetError.got(f"{name} in {path}", wanted, data.get(name), hint)
    try:
        return TransformerConfig.from_dict(data.get("config", {}))
    except (ArgumentError, ArgumentTypeError, ShapeError) as error:
        raise AssetError.got(
            f"config in {path}", "one that AdaAttn wrote", error, _AGAIN
        ) from error


def _read_weights(
    path: Path, device: torch.device | str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    library = import_package("safetensors.torch")
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        hint = f"copy it beside {CONFIG_FILE}, or {_AGAIN}"
        raise AssetError.got(f"{path}", "the weights", "no file", hint)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return library.load_file(path, device=str(torch.device(device))), metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise AssetError.got(f"{path}", "a whole safetensors file", error, _AGAIN) from error
