"""A kind of call is bound once: a repeated call must be the same call, never a similar one."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaattn import (
    AttentionEvent,
    AuxRequest,
    DenseAttention,
    History,
    Policy,
    functional,
    hardware,
    plan_attention,
    record_events,
    save_policy,
    use_policy,
)
from adaattn import scaled_dot_product_attention as attend
from adaattn.call import bind, choose
from adaattn.errors import AdaAttnError, ArgumentError, PlanError
from adaattn.spec.evidence import Cell, Measured, TimingTable, problem_class
from adaattn.testing import assert_matches, fake_facts


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note each call that is described and decided from scratch."""
    calls: list[object] = []
    honest = functional.bind

    def noting(*args: Any, **settings: Any) -> Any:
        calls.append(args)
        return honest(*args, **settings)

    monkeypatch.setattr(functional, "bind", noting)
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
    "4-D mask alone": lambda: {"attn_mask": torch.randn(2, 1, 32, 32)},
    "a backend": lambda: {"backend": "chunked"},
    "a layer": lambda: {"layer": 3, "window": (5, 3)},
    "a small error budget": lambda: {"policy": "balanced"},
    "a history": lambda: {"policy": "balanced", "history": History()},
    "the decision": lambda: {"return_aux": True},
    "more outputs": lambda: {"return_aux": AuxRequest(lse=True, entropy=True)},
    "a plan": lambda: {"plan": plan_attention(*draw(), backend="chunked").plan},
    "a plan and the decision": lambda: {
        "plan": plan_attention(*draw()).plan,
        "return_aux": True,
    },
}


def output_of(found: Any) -> torch.Tensor:
    """Return the output of a call, whether or not more was asked for."""
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output


@pytest.mark.parametrize("name", SETTINGS)
def test_a_repeated_call_is_bound_once_and_gives_the_same(name: str, bindings: list[Any]) -> None:
    tensors, settings = draw(), SETTINGS[name]()
    first = output_of(attend(*tensors, **settings))
    for _ in range(2):
        assert torch.equal(output_of(attend(*tensors, **settings)), first)
    assert len(bindings) == 1


def test_a_repeated_packed_call_is_bound_once(bindings: list[Any]) -> None:
    tensors = [torch.randn(1, 4, 24, 16) for _ in range(3)]
    for lengths in ((10, 14), (3, 21), (10, 14)):
        bounds = torch.tensor([0, lengths[0], 24], dtype=torch.int32)
        output = attend(*tensors, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        parts = zip(*(item.split(lengths, dim=2) for item in tensors), strict=True)
        alone = torch.cat([attend(*part, backend="reference") for part in parts], dim=2)
        parts = zip(*(item.double().split(lengths, dim=2) for item in tensors), strict=True)
        exact = torch.cat([attend(*part, backend="reference") for part in parts], dim=2)
        assert_matches(output, exact, alone, summands=24 + 16)
    packed = [call for call in bindings if call[3].cu_seqlens_q is not None]
    assert len(packed) == 1


def test_a_repeated_call_that_approximates_is_bound_once(
    monkeypatch: pytest.MonkeyPatch, bindings: list[Any]
) -> None:
    facts = fake_facts("cpu")
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    tensors = [torch.randn(1, 2, 2048, 8) @ torch.randn(8, 64) / 8 for _ in range(3)]
    policy = Policy(error_budget=0.05)
    for settings in ({"policy": policy}, {"policy": policy, "return_aux": True}):
        bindings.clear()
        events: list[AttentionEvent] = []
        with record_events(events.append):
            first, again = (output_of(attend(*tensors, **settings)) for _ in range(2))
        assert not any(event.decision.plan.is_exact for event in events)
        assert torch.equal(first, again)
        assert len(bindings) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_transposed_layout_is_a_kind_of_its_own(place: int, bindings: list[Any]) -> None:
    """PyTorch's choice of a kernel depends on strides, so that of another layout is no guide."""
    for length_q in (32, 1):
        bindings.clear()
        query, key, value = draw()
        tensors = [query[:, :, :length_q].contiguous(), key, value]
        other = list(tensors)
        other[place] = tensors[place].mT.contiguous().mT
        if other[place].stride() == tensors[place].stride():
            continue  # a single row has no other layout
        wide = [item.double() for item in tensors]
        exact, eager = (attend(*items, backend="reference") for items in (wide, tensors))
        bindings.clear()
        for items in (tensors, other, tensors, other):
            assert_matches(attend(*items), exact, eager, summands=32 + 16)
        assert len(bindings) == 2


def test_heads_and_lengths_that_were_transposed_are_a_kind_of_their_own(
    bindings: list[Any],
) -> None:
    """[B, S, H, D] seen as [B, H, S, D], as most models pass it."""
    plain = draw()
    seen = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in plain]
    for items in (plain, seen, plain, seen):
        attend(*items)
    assert len(bindings) == 2


def test_other_numbers_in_the_same_shapes_are_the_same_kind(bindings: list[Any]) -> None:
    one, other = draw(), draw()
    attend(*one, window=(5, 3))
    bound = attend(*other, window=(5, 3))
    assert len(bindings) == 1
    hardware.clear_cache()
    assert torch.equal(attend(*other, window=(5, 3)), bound)
    assert len(bindings) == 2


def test_events_are_emitted_by_a_call_that_is_bound(bindings: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    attend(*tensors)
    assert len(bindings) == 1
    events: list[AttentionEvent] = []
    with record_events(events.append):
        attend(*tensors, tag="layer3")
    assert [event.tag for event in events] == ["layer3"]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_event_of_a_repeated_call_is_that_of_the_first(name: str, bindings: list[Any]) -> None:
    tensors, settings = draw(), SETTINGS[name]()
    events: list[AttentionEvent] = []
    with record_events(events.append):
        for tag in ("", "layer3", ""):
            attend(*tensors, **settings, tag=tag)
    assert len(bindings) == 1
    first, tagged, again = events
    assert again == first and again.decision == first.decision
    assert tagged == replace(first, tag="layer3")
    assert first.time_ms is None and first.stats is None


def test_plain_calls_tell_one_and_the_same_event(bindings: list[Any]) -> None:
    """Statistics count what is the same object without looking into it."""
    tensors = draw()
    events: list[AttentionEvent] = []
    with record_events(events.append):
        for _ in range(2):
            attend(*tensors, tag="layer3")
    assert events[0] is events[1]


def test_a_sink_that_wants_time_gets_it_from_a_call_that_is_bound(bindings: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    events: list[AttentionEvent] = []
    with record_events(events.append, timing=True):
        attend(*tensors)
    assert len(bindings) == 1
    assert events[0].time_ms is not None and events[0].time_ms > 0


class TestTheLog:
    """What no fused kernel serves is logged once a kind of call; before, `kernels/` alone did."""

    @pytest.fixture(autouse=True)
    def fresh(self, caplog: pytest.LogCaptureFixture) -> None:
        hardware.clear_cache()
        caplog.set_level(logging.INFO, "adaattn")

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    def test_the_first_call_of_a_kind_is_logged_with_the_reason(
        self, caplog: pytest.LogCaptureFixture, policy: str
    ) -> None:
        for layer in (0, 0, 0, 1):
            attend(*draw(), softcap=30.0, policy=policy, layer=layer)
        (message,) = caplog.messages
        assert message.startswith("no fused kernel serves queries [2, 4, 32, 16] over 32 keys, ")
        assert message.endswith(" does: sdpa.flash: it does not support softcap")
        attend(*draw(length=33), softcap=30.0, policy=policy)
        assert len(caplog.messages) == 2

    def test_numbers_in_tensors_make_no_new_kind(self, caplog: pytest.LogCaptureFixture) -> None:
        """Such calls are bound each time."""
        for _ in range(3):
            attend(*draw(), softcap=torch.tensor(30.0))
        assert len(caplog.messages) == 1

    def test_statistics_count_each_call_under_the_same_reason(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        module = DenseAttention(64, 4, softcap=30.0)
        for _ in range(3):
            module(torch.randn(2, 32, 64))
        found = module.get_statistics()
        reason = "sdpa.flash: it does not support softcap"
        assert found["fallback_reasons"] == {reason: 3} and found["step_downs"] == 0
        assert len(caplog.messages) == 1 and caplog.messages[0].endswith(reason)

    @pytest.mark.parametrize(
        "name", ["dense", "causal", "a backend", "a plan", "a plan and the decision"]
    )
    def test_what_is_fused_or_asked_for_is_not_logged(
        self, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        settings = SETTINGS[name]()
        caplog.clear()
        attend(*draw(), **settings)
        assert caplog.messages == []


def test_a_failing_sink_does_not_stop_a_repeated_call(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: AttentionEvent) -> None:
        raise RuntimeError("a full disk")

    tensors = draw()
    first = attend(*tensors)
    with record_events(fail):
        assert torch.equal(attend(*tensors), first)
    assert caplog.text.count("an event sink failed") == 1


def test_a_history_changes_nothing_about_a_call_that_loses_nothing(bindings: list[Any]) -> None:
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


def test_the_ambient_policy_is_part_of_the_call(bindings: list[Any]) -> None:
    tensors = draw()
    attend(*tensors)
    with use_policy(Policy(memory_budget_bytes=0)), pytest.raises(PlanError, match="memory"):
        attend(*tensors)
    attend(*tensors)
    assert len(bindings) == 2


def test_a_policy_file_is_read_again_after_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    tensors = draw()
    save_policy(Policy(), path)
    for _ in range(2):
        attend(*tensors, policy=str(path))
    save_policy(Policy(memory_budget_bytes=0), path)
    with pytest.raises(PlanError, match="memory budget"):
        attend(*tensors, policy=str(path))


def test_a_change_of_shape_or_dtype_is_noticed(bindings: list[Any]) -> None:
    query, key, value = draw()
    attend(query, key, value, softcap=2.0)
    assert attend(query[:, :, :7], key, value, softcap=2.0).shape == (2, 4, 7, 16)
    assert attend(query, key, value[..., :5], softcap=2.0).shape == (2, 4, 32, 5)
    halves = [item.bfloat16() for item in (query, key, value)]
    assert attend(*halves, softcap=2.0).dtype is torch.bfloat16
    assert len(bindings) == 4


def test_a_wish_for_gradients_is_noticed(bindings: list[Any]) -> None:
    query, key, value = draw()
    attend(query, key, value)
    query.requires_grad_()
    output = attend(query, key, value)
    assert len(bindings) == 2
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


def test_bound_calls_are_few(monkeypatch: pytest.MonkeyPatch, bindings: list[Any]) -> None:
    monkeypatch.setattr(bind, "_KEPT", 4)
    for length in range(1, 12):
        attend(*draw(length=length))
        assert bind.bound_calls() <= 4
    assert len(bindings) == 11


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_a_number_in_a_tensor_that_changes_in_place_is_noticed(name: str) -> None:
    tensors = draw()
    number = torch.tensor(0.0 if name == "dropout_p" else 0.5)
    before = attend(*tensors, **{name: number})
    assert torch.equal(before, attend(*tensors, **{name: number.item()}))
    number.fill_(1.0)
    after = attend(*tensors, **{name: number})
    assert torch.equal(after, attend(*tensors, **{name: 1.0}))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("window", [(5.0, 3), (5, 3.0), (5,), (5, 3, 1)], ids=str)
def test_a_wrong_window_is_refused_after_a_right_one_like_it(window: Any) -> None:
    tensors = draw()
    for _ in range(2):
        attend(*tensors, window=(5, 3))
    with pytest.raises(AdaAttnError, match=r"window: expected \(left, right\)"):
        attend(*tensors, window=window)


def test_a_wrong_dilation_is_refused_after_a_right_one_like_it() -> None:
    tensors = draw()
    attend(*tensors, dilation=2)
    with pytest.raises(ArgumentError, match="dilation: expected an integer of at least 1, got 2"):
        attend(*tensors, dilation=2.0)


class TestDecoding:
    """One query row over a cache that grows by a token a call."""

    @staticmethod
    def draw(length: int, kv_heads: int = 4) -> list[torch.Tensor]:
        """Return one query row, and a cache of the given length."""
        return [torch.randn(1, 4, 1, 16), *torch.randn(2, 1, kv_heads, length, 16)]

    @staticmethod
    def assert_right(output: torch.Tensor, tensors: list[torch.Tensor], **settings: Any) -> None:
        """Check a call by the one rule, with eager PyTorch as the yardstick."""
        exact = attend(*(item.double() for item in tensors), backend="reference", **settings)
        eager = attend(*tensors, backend="reference", **settings)
        assert_matches(output, exact, eager, summands=16 + tensors[1].shape[2])

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    @pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal heads", "grouped heads"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_300_steps_leave_at_most_a_dozen_bound_calls(
        self, kv_heads: int, is_causal: bool, policy: str, bindings: list[Any]
    ) -> None:
        settings: dict[str, Any] = {"enable_gqa": kv_heads < 4, "policy": policy}
        if is_causal:
            settings |= {"is_causal": True, "align": "bottom_right"}
        query, key, value = self.draw(310, kv_heads)
        grown = [(query, key[:, :, :length], value[:, :, :length]) for length in range(1, 311)]
        outputs = [attend(*step, **settings) for step in grown]
        # Up to 8 keys each length is a kind of its own; then one for each power of two.
        assert len(bindings) == bind.bound_calls() <= 14
        del settings["policy"]
        for step, output in list(zip(grown, outputs, strict=True))[::7]:
            self.assert_right(output, list(step), **settings)

    def test_a_cache_that_is_concatenated_is_bound_as_seldom(self, bindings: list[Any]) -> None:
        """Its strides change with each token, unlike those of a slice of a large buffer."""
        query, key, value = self.draw(310)
        for length in range(1, 311):
            attend(query, key[:, :, :length].contiguous(), value[:, :, :length].contiguous())
        assert len(bindings) <= 14

    @pytest.mark.parametrize("kind", ["boolean", "additive"])
    def test_a_mask_that_grows_along_is_bound_as_seldom(
        self, kind: str, bindings: list[Any]
    ) -> None:
        query, key, value = self.draw(310)
        mask = torch.rand(1, 1, 1, 310) > 0.3
        mask[..., 0] = True
        given = mask if kind == "boolean" else torch.zeros(1, 1, 1, 310).masked_fill_(~mask, -9.0)
        for length in range(1, 311):
            step = [query, key[:, :, :length], value[:, :, :length]]
            output = attend(*step, attn_mask=given[..., :length])
            if length % 37 == 0:
                bound = len(bindings)
                self.assert_right(output, step, attn_mask=given[..., :length])
                del bindings[bound:]
        assert len(bindings) <= 16

    @pytest.mark.parametrize("policy", ["quality", "balanced"])
    def test_it_is_decided_once_for_each_power_of_two(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        choose._decide.cache_clear()
        decided: list[int] = []
        decide = choose.decide

        def counting(problem: Any, *args: Any, **settings: Any) -> Any:
            decided.append(problem.len_k)
            return decide(problem, *args, **settings)

        monkeypatch.setattr(choose, "decide", counting)
        query, key, value = self.draw(140, 2)
        settings = {"is_causal": True, "align": "bottom_right", "enable_gqa": True}
        for length in range(100, 141):
            step = (query, key[:, :, :length], value[:, :, :length])
            attend(*step, policy=policy, **settings)
        assert decided == [128, 256]

    @pytest.mark.parametrize(
        "settings",
        [
            {"window": (99, 0), "align": "bottom_right"},
            {"window": (99, 0), "align": "bottom_right", "is_causal": True},
            {"window": (-1, 70)},
        ],
        ids=str,
    )
    def test_a_window_that_the_cache_outgrows_is_kept(self, settings: dict[str, Any]) -> None:
        """It was bound at a length that the window spans, as a call without one.

        Longer caches found that bound call and saw what the window hides.
        """
        query, key, value = self.draw(128)
        for length in (66, 99, 100, 101, 120, 128):
            step = [query, key[:, :, :length], value[:, :, :length]]
            self.assert_right(attend(*step, **settings), step, **settings)

    @pytest.mark.parametrize("kv_heads", [4, 2], ids=["equal heads", "grouped heads"])
    @pytest.mark.parametrize(
        "settings",
        [
            {"softcap": 2.0},
            {"dilation": 3},
            {"dilation": 3, "align": "bottom_right"},
            {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
            {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "align": "bottom_right"},
        ],
        ids=lambda settings: " ".join(settings),
    )
    def test_what_pytorch_cannot_say_is_right_at_each_length(
        self, settings: dict[str, Any], kv_heads: int, bindings: list[Any]
    ) -> None:
        settings = settings | {"enable_gqa": kv_heads < 4}
        query, key, value = self.draw(128, kv_heads)
        steps = [
            [query, key[:, :, :length], value[:, :, :length]] for length in (66, 99, 120, 128, 65)
        ]
        outputs = [attend(*step, **settings) for step in steps]
        assert len(bindings) == 1
        for step, output in zip(steps, outputs, strict=True):
            self.assert_right(output, step, **settings)

    def test_its_events_tell_their_own_lengths(self) -> None:
        """Each told the length of the step that was bound, and statistics counted that."""
        query, key, value = self.draw(128)
        events: list[AttentionEvent] = []
        with record_events(events.append):
            for length in (66, 100, 128):
                attend(query, key[:, :, :length], value[:, :, :length])
        assert [event.problem.len_k for event in events] == [66, 100, 128]


def test_a_compiled_executor_waits_until_the_calls_before_it_have_paid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gains 1 ms a call and costs 4.5 ms to compile: the sixth call is the first to have it."""
    tensors, settings = draw(), {"softcap": 2.0}
    plain = plan_attention(*tensors, **settings)
    name = plain.plan.groups[0].capability
    events: list[AttentionEvent] = []
    with record_events(events.append):
        attend(*tensors, **settings)
    problem = events.pop().problem
    cell = Cell(
        problem_class=problem_class(problem),
        heads=problem.batch * problem.num_heads,
        group_size=1,
        len_q=32,
        len_k=32,
        head_dim=16,
        visible=32.0,
        times={
            name: Measured(device_ms=2.0, host_ms=2.0),
            "reference": Measured(device_ms=1.0, host_ms=1.0, compile_ms=4.5),
        },
    )
    table = TimingTable(source="planted", cells={cell.problem_class: (cell,)})
    facts = replace(fake_facts("cpu"), timings=table)
    monkeypatch.setattr("adaattn.hardware.probe", lambda device: facts)
    hardware.clear_cache()
    with record_events(events.append):
        for _ in range(8):
            attend(*tensors, **settings)
    served = [event.decision.plan.groups[0].capability for event in events]
    assert served == [name] * 5 + ["reference"] * 3


def test_forgetting_the_devices_facts_forgets_what_was_bound() -> None:
    """Decisions rest on the facts; the same holds for whoever registers with `on_clear`."""
    attend(*draw())
    assert bind.bound_calls() == 1
    hardware.clear_cache()
    assert bind.bound_calls() == 0


@pytest.mark.parametrize("policy", ["quality", "balanced"])
def test_a_recomputed_call_saves_what_the_first_one_saved(policy: str) -> None:
    """The forward pass is the first of its kind, its recomputation finds it bound.

    One saved the mask with its own two dimensions, and checkpointing refused the difference.
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
