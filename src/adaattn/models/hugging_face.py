"""Weights of Transformers models, taken over into a `Decoder` or an `Encoder`.

Nothing is guessed: a model type, a class, a feature of the config or a tensor that has no
counterpart here is refused with its name. Not covered: mixtures of experts, Gemma, RoBERTa.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from adaattn._packages import import_package
from adaattn.errors import ArgumentTypeError, AssetError, UnsupportedError, expected_got
from adaattn.models._families import FAMILIES, REFUSED, Family, Rule, find_family
from adaattn.models.config import TransformerConfig
from adaattn.models.decoder import Decoder
from adaattn.models.encoder import Encoder
from adaattn.models.kinds import AttentionKind
from adaattn.models.saving import counted

__all__ = ["from_hugging_face"]

_REQUEST = "from_hugging_face"


def from_hugging_face(
    model_or_path: Any,
    *,
    attention: AttentionKind | str = AttentionKind.DENSE,
    attention_settings: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Decoder | Encoder:
    """Return a model with the weights of a Transformers model, in evaluation mode.

    GPT-2, and Llama, Mistral, Qwen2 and Qwen3, become a `Decoder`; BERT and DistilBERT become
    an `Encoder`, without the heads of their pre-training. The source is left as it is and
    shares nothing.

    Args:
        model_or_path: a live model, or a folder that ``save_pretrained`` wrote; nothing is
            fetched.
        attention: which attention module the layers use.
        attention_settings: keyword arguments of that module, such as ``{"policy": "speed"}``.
        device: where the weights go; None is where the source's are.
        dtype: of the weights; None is that of the source's.

    Raises:
        UnsupportedError: a model type, class or feature that has no counterpart; says which have.
        AssetError: a folder or its files are missing or broken, a tensor is left over, or one is
            missing.
        ArgumentTypeError: neither a model nor a path; a setting that the module does not take.

    Example:
        >>> from adaattn.models import from_hugging_face
        >>> model = from_hugging_face("folder/of/a/model")  # doctest: +SKIP
        >>> model.generate(tokens, max_new_tokens=20)  # doctest: +SKIP
    """
    if isinstance(model_or_path, (str, os.PathLike)):
        source, subject = _load_folder(Path(model_or_path).expanduser(), dtype), str(model_or_path)
    elif isinstance(model_or_path, torch.nn.Module) and hasattr(model_or_path, "config"):
        source, subject = model_or_path, type(model_or_path).__name__
    else:
        raise ArgumentTypeError.got(
            "model_or_path", "a Transformers model or a folder", type(model_or_path).__name__
        )
    family = _family_of(str(getattr(source.config, "model_type", "")))
    architecture = type(source).__name__
    _refuse_features(family, source.config, architecture)
    tensors = {n.removeprefix(family.prefix): t for n, t in source.state_dict().items()}
    config = _convert_config(family, source, tensors.keys(), attention, attention_settings)
    with torch.random.fork_rng(devices=[]):  # fresh weights are replaced: no number is spent
        model = Encoder(config) if family.is_encoder else Decoder(config)
    translated = _translate(family, tensors, model.state_dict(), subject)
    model.assign(translated, f"weights of {subject}")
    return model.to(device=device, dtype=dtype).eval()


def _family_of(model_type: str) -> Family:
    """Return the family of a model type."""
    family = find_family(model_type)
    if family is not None:
        return family
    known = ", ".join(sorted(name for item in FAMILIES for name in item.model_types))
    why = REFUSED.get(model_type, "no rule says how its weights are named")
    raise UnsupportedError(
        _REQUEST,
        [f"model type {model_type!r}: {why}"],
        f"Supported are {known}; adaattn.integrations.transformers runs others in place.",
    )


def _refuse_features(family: Family, config: Any, architecture: str) -> None:
    """Refuse a class or a feature that would be lost, with every reason at once."""
    reasons = []
    if architecture not in family.architectures:
        known = ", ".join(family.architectures)
        reasons.append(expected_got("class of the model", f"one of {known}", architecture))
    for name, (wanted, meaning) in family.needs.items():
        if (found := getattr(config, name, wanted)) != wanted:
            reasons.append(f"{name} is {found!r}: there is no counterpart of {meaning}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        reasons.append("rope_parameters rotate a part of each head, which these models never do")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        reasons.append(f"layer_types hold {', '.join(unknown)}")
    if reasons:
        raise UnsupportedError(_REQUEST, reasons)


def _convert_config(
    family: Family,
    source: Any,
    names: Set[str],
    attention: AttentionKind | str,
    settings: Mapping[str, Any] | None,
) -> TransformerConfig:
    """Return our config of their model."""
    config = source.config
    vocabulary = config.vocab_size
    generation = getattr(source, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    pad = getattr(config, "pad_token_id", None)
    fields = {
        **family.convert(config, names),
        # Configs of cut-down models keep tokens that their vocabulary has lost.
        "eos_token_ids": tuple(t for t in ends if t is not None and 0 <= t < vocabulary),
        "pad_token_id": pad if pad is not None and 0 <= pad < vocabulary else None,
        "attention": attention,
        "attention_settings": settings or {},
    }
    return TransformerConfig(**fields)


def _translate(
    family: Family,
    source: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    subject: str,
) -> dict[str, torch.Tensor]:
    """Return our tensors, each of its own memory; every one of theirs is used or listed."""
    missing: list[str] = []
    used: set[str] = set()
    result = {}
    for name in wanted:
        layer = name.split(".")[1] if name.startswith("blocks.") else ""
        rule = family.rules[name.replace(f".{layer}.", ".*.", 1) if layer else name]
        names = [template.replace("*", layer) for template in rule.sources]
        used.update(names)
        if absent := [item for item in names if item not in source]:
            missing += absent
        else:
            result[name] = _join([source[item] for item in names], rule)
    if "head.weight" not in wanted and _is_tied(source, family):
        used.add("lm_head.weight")
    left = [name for name in source if name not in used and not _is_ignored(name, family)]
    if problems := counted(("no", missing), ("unused", left)):
        hint = "a class without its head has no lm_head" if "lm_head.weight" in missing else ""
        raise AssetError.got(
            f"weights of {subject}",
            f"those of {' or '.join(family.model_types)}, each with a use",
            problems,
            hint,
        )
    return result


def _join(tensors: list[torch.Tensor], rule: Rule) -> torch.Tensor:
    """Return the tensors behind one another, in memory of their own."""
    parts = [tensor.detach().T if rule.transposed else tensor.detach() for tensor in tensors]
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0].clone(memory_format=torch.contiguous_format)


def _is_tied(source: Mapping[str, torch.Tensor], family: Family) -> bool:
    """Return whether the head is there and is the token embedding."""
    head = source.get("lm_head.weight")
    tokens = source.get(family.rules["embeddings.tokens.weight"].sources[0])
    return head is not None and tokens is not None and torch.equal(head, tokens)


def _is_ignored(name: str, family: Family) -> bool:
    """Return whether a tensor is listed as one without a counterpart."""
    return any(name.startswith(part) or name.endswith(part) for part in family.ignored)


def _load_folder(folder: Path, dtype: torch.dtype | None) -> Any:
    """Return the Transformers model in a folder; all its weights come from there."""
    data = _read_config(folder)
    family = _family_of(str(data.get("model_type", "")))
    named = data.get("architectures") or ["none named"]
    if named[0] not in family.architectures:
        known = ", ".join(family.architectures)
        wrong = expected_got(f"architectures in {folder}", f"one of {known}", named[0])
        raise UnsupportedError(_REQUEST, [wrong])
    transformers = import_package("transformers")
    wrong_file = import_package("safetensors").SafetensorError
    with _quiet(transformers):
        try:
            model, info = getattr(transformers, named[0]).from_pretrained(
                str(folder),
                dtype=dtype or "auto",
                local_files_only=True,
                use_safetensors=True,  # never unpickled
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, wrong_file) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise AssetError.got(
                f"model in {folder}", "one that Transformers loads", reason
            ) from error
    _refuse_gaps(folder, family, info)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a folder as plain values."""
    path = folder / "config.json"
    hint = "give a folder that save_pretrained wrote; nothing is fetched by name"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AssetError.got(f"{path}", "a readable file", repr(error), hint) from error
    except ValueError as error:
        raise AssetError.got(f"{path}", "JSON", error, hint) from error
    if not isinstance(data, dict) or "model_type" not in data:
        ours = isinstance(data, dict) and "format" in data
        raise AssetError.got(
            f"{path}",
            "a config of Transformers",
            "one of adaattn.models" if ours else "another file",
            "use Decoder.load or Encoder.load" if ours else hint,
        )
    return data


def _refuse_gaps(folder: Path, family: Family, info: Mapping[str, Any]) -> None:
    """Refuse weights that Transformers would have made up, and those that it would drop."""
    absent = sorted(info["missing_keys"])
    shapes = sorted(str(item[0]) for item in info["mismatched_keys"])
    extra = [
        name
        for name in sorted(info["unexpected_keys"])
        if not _is_ignored(name.removeprefix(family.prefix), family)
    ]
    if problems := counted(("no", absent), ("other shapes of", shapes), ("unused", extra)):
        raise AssetError.got(f"weights in {folder}", "those of its config", problems)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Turn off Transformers' progress bars and reports for a while; we check what they say."""
    logging = transformers.utils.logging
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
