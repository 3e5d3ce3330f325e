"""Causal language models from Transformers, split into layers and vocabulary projection.

Shape legend: ``T`` tokens of a window, ``N`` scored tokens, ``C`` hidden size, ``V`` vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaattn._packages import import_package
from adaattn.errors import AssetError
from adaattn.evaluation.assets import Progress, demo_model
from adaattn.hardware.probe import resolve

__all__ = ["DTYPES", "LanguageModel", "choose_device", "load_model"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_CHECKED_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LanguageModel:
    """A model in evaluation mode, and how to get logits from it a few rows at a time.

    Args:
        name: what the user asked for.
        network: the Transformers model.
        tokenizer: its tokenizer.
        device: where it lives.
        layers: everything before the vocabulary projection; None when the model does more
            than project (softcapped or scaled logits, say), and logits are then kept whole.
        head: the vocabulary projection; None likewise.
    """

    name: str
    network: Any
    tokenizer: Any
    device: torch.device
    layers: Callable[..., Any] | None = None
    head: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [T, C] hidden states, or [T, V] logits where the model cannot be split.

        Args:
            tokens: [1, T] int64.
        """
        if self.layers is None:
            output: torch.Tensor = self.network(input_ids=tokens, use_cache=False).logits
        else:
            output = self.layers(input_ids=tokens, use_cache=False).last_hidden_state
        return output[0]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [N, V] logits of rows that `forward` returned."""
        return rows if self.head is None else self.head(rows)

    def encode(self, text: str, limit: int) -> tuple[list[int], list[int]]:
        """Return (prefix, tokens): what starts every window, and the text's first tokens.

        Args:
            text: what to encode.
            limit: most tokens to return.
        """
        plain = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        first = self.tokenizer("a")["input_ids"][:1]
        start = self.tokenizer.bos_token_id
        prefix = [start] if start is not None and first == [start] else []
        return prefix, list(plain[:limit])


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> LanguageModel:
    """Return a causal language model ready to be evaluated.

    Args:
        name: ``"demo"``, a Transformers name, or a folder.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        progress: called with how far fetching the demo model is.

    Raises:
        AssetError: there is no such model, or it cannot be read.
        DeviceError: there is no such device.
    """
    chosen = choose_device(device)
    transformers = import_package("transformers")
    source = str(demo_model(progress=progress)) if name == "demo" else name
    if source == name and _looks_like_folder(name) and not Path(name).expanduser().is_dir():
        raise AssetError.got(f"model {name!r}", "a folder", "none there", _MODEL_HINT)
    is_offline = not Path(source).expanduser().is_dir() and not _hub_answers()
    with _quiet_transformers(), _model_errors(name, is_offline):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=is_offline)
        network = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], local_files_only=is_offline
        )
        network = network.to(chosen).eval()
    layers, head = _split(network, chosen)
    return LanguageModel(
        name=name, network=network, tokenizer=tokenizer, device=chosen, layers=layers, head=head
    )


def choose_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is CUDA where there is one.

    Raises:
        DeviceError: the name is unknown, or the device is not there.
    """
    return resolve(None if name == "auto" else name)


_MODEL_HINT = 'use "demo", a Transformers name, or the folder of a causal language model'


_OFFLINE_HINT = 'connect to the network (without HF_HUB_OFFLINE), or use "demo" or a folder'
_HUB_TIMEOUT_S = 5.0


def _hub_answers() -> bool:
    """Return whether the hub can be reached: asked once, where Transformers retries for minutes."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # noqa: BLE001 - each version of the hub's client has errors of its own
        return False
    return True


def _looks_like_folder(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


@contextlib.contextmanager
def _model_errors(name: str, is_offline: bool) -> Iterator[None]:
    """Turn the many ways a model cannot be loaded into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if is_offline and isinstance(error, OSError):
            expected = "a model in the hub's cache, since the hub cannot be reached"
            raise AssetError.got(
                f"model {name!r}", expected, "none there", _OFFLINE_HINT
            ) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise AssetError.got(
            f"model {name!r}", "a model that can be loaded", reason, _MODEL_HINT
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Turn off Transformers' own progress bars for a while: ours says what happens."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _split(
    network: Any, device: torch.device
) -> tuple[Callable[..., Any] | None, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Return (layers, head) when projecting the layers' output is all that the model does.

    That is found by trying: models with softcapped or scaled logits compute something else.
    """
    layers, head = network.base_model, network.get_output_embeddings()
    if layers is network or head is None:
        return None, None
    tokens = torch.arange(_CHECKED_TOKENS, device=device)[None] % network.config.vocab_size
    with torch.inference_mode():
        whole = network(input_ids=tokens, use_cache=False).logits
        parts = getattr(layers(input_ids=tokens, use_cache=False), "last_hidden_state", None)
        if parts is None or not torch.equal(head(parts).to(whole.dtype), whole):
            return None, None
    return layers, head
