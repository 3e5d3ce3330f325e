"""The second identical call takes a shortcut: it must be the same call, never a similar one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import (
    AttentionEvent,
    Policy,
    deciding,
    functional,
    hardware,
    record_events,
    save_policy,
    shortcuts,
    use_policy,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.errors import ArgumentError, PlanError
from adaattn.spec import History
from adaattn.testing import assert_matches


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Forget every shortcut, and note each call that is built and decided from scratch."""
    shortcuts._DIRECT.clear()
    calls: list[object] = []
    build = functional.build_call

    def noting(*args: Any) -> Any:
        calls.append(args)
        return build(*args)

    monkeypatch.setattr(functional, "build_call", noting)
    return calls


def draw(batch: int = 2, length: int = 32) -> list[torch.Tensor]:
    return [torch.randn(batch, 4, length, 16) for _ in range(3)]


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window": (5, 3)},
    "softcap": lambda: {"softcap": 2.0},
    "sinks": lambda: {"sinks": torch.randn(4)},
    "slopes of heads": lambda: {"alibi_slopes": torch.rand(4)},
    "slopes of batch and heads": lambda: {"alibi_slopes": torch.rand(2, 4)},
    "2-D mask": lambda: {"attn_mask": torch.rand(32, 32) > 0.3},
    "2-D mask in a window": lambda: {"attn_mask": torch.rand(32, 32) > 0.3, "window": (5, 3)},
    "4-D mask": lambda: {"attn_mask": torch.randn(1, 4, 32, 32), "softcap": 2.0},
    "a backend": lambda: {"backend": "chunked"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_repeated_call_is_decided_once_and_gives_the_same(name: str, decided: list[Any]) -> None:
    tensors, settings = draw(), SETTINGS[name]()
    first = attend(*tensors, **settings)
    for _ in range(2):
        assert torch.equal(attend(*tensors, **settings), first)
    assert len(decided) == 1


def test_other_numbers_in_the_same_shapes_take_the_shortcut(decided: list[Any]) -> None:
    one, other = draw(), draw()
    attend(*one, window=(5, 3))
    shortcut = attend(*other, window=(5, 3))
    shortcuts._DIRECT.clear()
    assert torch.equal(attend(*other, window=(5, 3)), shortcut)
    assert len(decided) == 2


def test_events_are_emitted_although_a_shortcut_is_known(decided: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    attend(*tensors)
    assert len(decided) == 1
    events: list[AttentionEvent] = []
    with record_events(events.append):
        attend(*tensors, tag="layer3")
    assert [event.tag for event in events] == ["layer3"]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_event_of_a_shortcut_is_that_of_the_call_that_was_decided(
    name: str, decided: list[Any]
) -> None:
    tensors, settings = draw(), SETTINGS[name]()
    events: list[AttentionEvent] = []
    with record_events(events.append):
        for tag in ("", "layer3", ""):
            attend(*tensors, **settings, tag=tag)
    assert len(decided) == 1
    first, tagged, again = events
    assert again == first and again.decision is first.decision
    assert tagged == replace(first, tag="layer3")
    assert first.time_ms is None and first.stats is None


def test_a_sink_that_wants_time_gets_it_although_a_shortcut_is_known(decided: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    events: list[AttentionEvent] = []
    with record_events(events.append, timing=True):
        attend(*tensors)
    assert len(decided) == 2
    assert events[0].time_ms is not None and events[0].time_ms > 0


def test_a_failing_sink_does_not_stop_a_shortcut(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: AttentionEvent) -> None:
        raise RuntimeError("a full disk")

    tensors = draw()
    first = attend(*tensors)
    with record_events(fail):
        assert torch.equal(attend(*tensors), first)
    assert caplog.text.count("an event sink failed") == 1


def test_a_history_changes_nothing_about_a_call_that_loses_nothing(decided: list[Any]) -> None:
    tensors = draw()
    first = attend(*tensors, window=(5, 3))
    assert torch.equal(attend(*tensors, window=(5, 3), history=History()), first)


def test_a_policy_is_never_taken_for_another_that_inherits_its_identity() -> None:
    """CPython gives a freed object's id to the next one of its size."""
    tensors = draw()
    for _ in range(20):
        attend(*tensors, policy=Policy())
        with pytest.raises(PlanError, match="memory budget"):
            attend(*tensors, policy=Policy(memory_budget_bytes=0))


def test_the_ambient_policy_is_part_of_the_call(decided: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    with use_policy(Policy(memory_budget_bytes=0)), pytest.raises(PlanError, match="memory"):
        attend(*tensors)
    attend(*tensors)
    assert len(decided) == 2


def test_a_policy_file_is_read_again_after_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    tensors = draw()
    save_policy(Policy(), path)
    for _ in range(2):
        attend(*tensors, policy=str(path))
    save_policy(Policy(memory_budget_bytes=0), path)
    with pytest.raises(PlanError, match="memory budget"):
        attend(*tensors, policy=str(path))


def test_a_change_of_shape_or_dtype_is_noticed(decided: list[Any]) -> None:
    query, key, value = draw()
    attend(query, key, value, softcap=2.0)
    assert attend(query[:, :, :7], key, value, softcap=2.0).shape == (2, 4, 7, 16)
    assert attend(query, key, value[..., :5], softcap=2.0).shape == (2, 4, 32, 5)
    halves = [item.bfloat16() for item in (query, key, value)]
    assert attend(*halves, softcap=2.0).dtype is torch.bfloat16
    assert len(decided) == 4


def test_a_wish_for_gradients_is_noticed(decided: list[Any]) -> None:
    query, key, value = draw()
    attend(query, key, value)
    query.requires_grad_()
    output = attend(query, key, value)
    assert len(decided) == 2
    output.sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(
    "companion",
    [
        {"attn_mask": torch.randn(1, 1, 32, 32)},
        {"sinks": torch.randn(4)},
        {"alibi_slopes": torch.rand(4)},
    ],
    ids=lambda companion: next(iter(companion)),
)
def test_gradients_of_a_companion_survive_calls_without_them(
    companion: dict[str, torch.Tensor],
) -> None:
    """The key once left out grad mode when q, k and v wanted no gradient themselves."""
    tensors = draw()
    ((name, given),) = companion.items()
    leaf = given.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            attend(*tensors, **{name: leaf})
    attend(*tensors, **{name: leaf}).square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().amax() > 0


def test_the_shortcuts_are_bounded(monkeypatch: pytest.MonkeyPatch, decided: list[Any]) -> None:
    monkeypatch.setattr(shortcuts, "_KEPT_DIRECT", 4)
    for length in range(1, 12):
        attend(*draw(length=length))
        assert len(shortcuts._DIRECT) <= 4
    assert len(decided) == 11


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_in_a_tensor_that_changes_in_place_is_noticed(name: str) -> None:
    tensors = draw()
    number = torch.tensor(0.5)
    before = attend(*tensors, **{name: number})
    assert torch.equal(before, attend(*tensors, **{name: 0.5}))
    number.fill_(2.0)
    after = attend(*tensors, **{name: number})
    assert torch.equal(after, attend(*tensors, **{name: 2.0}))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("window", [(5.0, 3), (5, 3.0), (5,), (5, 3, 1)], ids=str)
def test_a_wrong_window_is_refused_after_a_right_one_like_it(window: Any) -> None:
    tensors = draw()
    for _ in range(2):
        attend(*tensors, window=(5, 3))
    with pytest.raises(ArgumentError, match=r"window: expected \(left, right\)"):
        attend(*tensors, window=window)


@pytest.mark.parametrize("policy", ["quality", "balanced"])
def test_a_growing_cache_is_decided_once_for_each_power_of_two(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding._decide_whole.cache_clear()
    decided: list[int] = []
    decide = deciding.decide

    def counting(problem: Any, *args: Any, **settings: Any) -> Any:
        decided.append(problem.len_k)
        return decide(problem, *args, **settings)

    monkeypatch.setattr(deciding, "decide", counting)
    query, key, value = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 140, 16)
    settings = {"is_causal": True, "align": "bottom_right", "enable_gqa": True}
    outputs = []
    for length in range(100, 141):
        grown = (query, key[:, :, :length], value[:, :, :length])
        outputs.append((grown, attend(*grown, policy=policy, **settings)))
    assert decided == [128, 256]
    for grown, output in outputs:
        exact = attend(*(item.double() for item in grown), backend="reference", **settings)
        eager = attend(*grown, backend="reference", **settings)
        assert_matches(output, exact, eager, summands=16 + grown[1].shape[2])


def test_forgetting_the_devices_facts_forgets_the_shortcuts() -> None:
    """Decisions rest on the facts; the same holds for whoever registers with `on_clear`."""
    attend(*draw())
    assert shortcuts._DIRECT
    hardware.clear_cache()
    assert not shortcuts._DIRECT


@pytest.mark.parametrize("policy", ["quality", "balanced"])
def test_a_recomputed_call_saves_what_the_first_one_saved(policy: str) -> None:
    """The forward pass is the first of its kind, its recomputation takes the shortcut.

    That saved the mask with its own two dimensions, and checkpointing refused the difference.
    """
    tensors = [torch.randn(1, 2, 37, 8, requires_grad=True) for _ in range(3)]
    mask = torch.randn(37, 37)
    output = checkpoint(
        lambda *items: attend(*items, attn_mask=mask, policy=policy).square(),
        *tensors,
        use_reentrant=False,
    )
    output.sum().backward()
    assert all(item.grad is not None for item in tensors)
