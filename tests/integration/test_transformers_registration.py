"""Registering with Transformers, undoing it, and what is refused."""

import gc
import sys
from typing import Any

import pytest
import torch
import transformers

from adaattn import hardware
from adaattn.errors import ArgumentError, AssetError, PolicyError, UnsupportedError
from adaattn.integrations.transformers import register, unregister
from adaattn.policies import resolve_policy


def test_undo_takes_both_functions_out_and_may_be_called_twice() -> None:
    handle = register("adaattn-test")
    assert handle.is_active
    assert "adaattn-test" in transformers.AttentionInterface._global_mapping
    assert "adaattn-test" in transformers.AttentionMaskInterface._global_mapping
    handle.undo()
    handle.undo()
    assert not handle.is_active
    assert "adaattn-test" not in transformers.AttentionInterface._global_mapping
    assert "adaattn-test" not in transformers.AttentionMaskInterface._global_mapping


def test_a_handle_undoes_itself_at_the_end_of_a_with_block_even_after_an_error() -> None:
    with pytest.raises(KeyError), register("adaattn-test") as handle:
        raise KeyError
    assert not handle.is_active
    assert repr(handle) == "Registration(name='adaattn-test', is_active=False)"


def test_undo_leaves_what_somebody_else_registered_since() -> None:
    handle = register("adaattn-test")
    transformers.AttentionInterface.register("adaattn-test", print)
    handle.undo()
    assert transformers.AttentionInterface._global_mapping.pop("adaattn-test") is print


@pytest.mark.parametrize("policy", ["speed", "quality", 0.02, None])
def test_registering_again_replaces_the_earlier_registration(policy: str | float | None) -> None:
    first = register("adaattn-test", policy="speed")
    with register("adaattn-test", policy=policy) as second:
        assert not first.is_active
        first.undo()
        assert second.is_active
        assert second.policy == (None if policy is None else resolve_policy(policy))
    assert "adaattn-test" not in transformers.AttentionInterface._global_mapping


def test_a_block_puts_back_what_it_replaced_unless_that_was_undone() -> None:
    registered = transformers.AttentionInterface._global_mapping
    first = register("adaattn-test", policy="speed")
    hooks = len(torch.nn.modules.module._global_module_registration_hooks)
    with register("adaattn-test") as second:
        with register("adaattn-test", policy="quality") as third:
            assert [handle.is_active for handle in (first, second, third)] == [False, False, True]
        assert second.is_active and not third.is_active
    assert first.is_active and not second.is_active
    assert len(torch.nn.modules.module._global_module_registration_hooks) == hooks
    with register("adaattn-test"):
        assert unregister("adaattn-test")
    assert "adaattn-test" not in registered and not first.is_active
    first = register("adaattn-test")
    with register("adaattn-test"):
        transformers.AttentionInterface.register("adaattn-test", print)
    assert registered.pop("adaattn-test") is print
    transformers.AttentionMaskInterface._global_mapping.pop("adaattn-test", None)
    first.undo()
    with register("adaattn-test") as last:
        pass
    assert not last.is_active and "adaattn-test" not in registered


def test_a_name_is_taken_out_without_its_handle() -> None:
    handle = register("adaattn-test")
    assert unregister("adaattn-test")
    assert not handle.is_active
    assert not unregister("adaattn-test")
    assert not unregister("sdpa")
    assert "sdpa" in transformers.AttentionInterface._global_mapping


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ArgumentError, match="does not know yet, got 'sdpa'"):
        register("sdpa")
    with pytest.raises(ArgumentError, match="does not know yet, got 'eager'"):
        register("eager")


def test_pytorch_keeps_no_hook_of_a_registration_that_was_undone() -> None:
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before = len(hooks)
    with register("adaattn-test"):
        assert len(hooks) == before + 1
    assert len(hooks) == before


@pytest.mark.parametrize("name", ["my-flash", "org/name", "paged|x", "", "Flash"])
def test_names_that_transformers_reads_otherwise_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="without 'flash'"):
        register(name)


def test_an_unknown_policy_is_refused_when_registering() -> None:
    with pytest.raises(PolicyError, match="'fastest'"):
        register("adaattn-test", policy="fastest")
    assert "adaattn-test" not in transformers.AttentionInterface._global_mapping


def test_a_missing_transformers_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AssetError, match=r"pip install 'adaattn\[hf\]'"):
        register()


def test_an_old_transformers_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(UnsupportedError, match=r"expected 5\.0 or later, got 4\.57\.1"):
        register()


def test_a_model_says_so_when_its_implementation_was_undone(tiny: Any) -> None:
    model = tiny("llama")
    with register():
        model.set_attn_implementation("adaattn")
    with pytest.raises(KeyError, match="not a valid attention implementation"):
        model(torch.arange(3, 9)[None])


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaModel(config).eval()


@pytest.mark.parametrize("policy", ["quality", "balanced"])
def test_the_handle_counts_calls_by_layer(policy: str) -> None:
    """Short calls are counted without an event; forgotten ones are kept."""
    lengths = (5, 5, 5, 9)
    with register("adaattn-test", policy=policy) as handle:
        model = llama()
        model.set_attn_implementation("adaattn-test")
        assert handle.statistics()["calls"] == 0
        for length in lengths:
            with torch.no_grad():
                model(torch.zeros(1, length, dtype=torch.long))
        for _ in range(2):  # asking changes nothing
            found = handle.statistics()
            assert found["calls"] == 2 * len(lengths)
            assert set(found["per_head"]) == {
                f"layer{n} head {h}" for n in (0, 1) for h in range(4)
            }
            assert found["per_head"]["layer1 head 2"]["calls exact"] == len(lengths)
        hardware.clear_cache()
        gc.collect()
        assert handle.statistics()["calls"] == 2 * len(lengths)
        with torch.no_grad():
            model(torch.zeros(1, 5, dtype=torch.long))
        assert handle.statistics()["calls"] == 2 * len(lengths) + 2
