"""Each row of docs/mistakes.md is run, and gives what the page says."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from adaattn import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| (.+) \| (?:`(\w+)`: |works: )`(.+)` \|$", re.MULTILINE)
SOURCE = re.compile(r"\b[\w.-]+/[\w.-]+#\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One row.

    Args:
        number: its place in the table.
        code: an expression.
        elsewhere: what other libraries do, with the threads that say so.
        error: the class of the error; "" where it works.
        answer: the message's beginning, … for parts left out; or what holds of ``out``.
    """

    number: int
    code: str
    elsewhere: str
    error: str
    answer: str


def rows() -> list[Mistake]:
    """Return the table."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [
        Mistake(number=int(number), code=code, elsewhere=elsewhere, error=error, answer=answer)
        for number, code, elsewhere, error, answer in found
    ]


MISTAKES = rows()
by_number = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda row: str(row.number))


def names() -> dict[str, Any]:
    """Return what the page's own block defines."""
    defined: dict[str, Any] = {}
    block = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(block, defined)
    return defined


def holds(mistake: Mistake) -> bool:
    """Return whether the row's line gives what its last column says."""
    defined = names()
    try:
        defined["out"] = eval(mistake.code, defined)
    except errors.AdaAttnError as error:
        text = " ".join(str(error).split())
        pattern = ".* ".join(re.escape(part.strip()) for part in mistake.answer.split("…"))
        return type(error).__name__ == mistake.error and re.match(pattern, text) is not None
    return not mistake.error and bool(eval(mistake.answer, defined))


def test_there_are_twenty() -> None:
    assert [row.number for row in MISTAKES] == list(range(1, 21))


@by_number
def test_the_answer_is_the_one_on_the_page(mistake: Mistake) -> None:
    assert holds(mistake)


@by_number
def test_another_answer_is_noticed(mistake: Mistake) -> None:
    wrong = f"{mistake.answer[:-1]}#" if mistake.error else f"not ({mistake.answer})"
    assert not holds(replace(mistake, answer=wrong))
    if mistake.error:
        assert not holds(replace(mistake, error="AdaAttnError"))
    else:
        assert not holds(replace(mistake, error="ShapeError"))


@by_number
def test_a_thread_stands_behind_it(mistake: Mistake) -> None:
    assert SOURCE.search(mistake.elsewhere)


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_a_flag_that_is_text_is_refused(name: str) -> None:
    """The word "False", as a configuration file has it, once counted as true."""
    given = names()
    with pytest.raises(errors.ArgumentTypeError, match=f"{name}: expected True or False, got 'Fal"):
        given["attend"](given["q"], given["k"], given["v"], **{name: "False"})


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((2, 12), "; a mask of keys is mask[:, None, None, :]"),
        ((2, 12, 12), "; a mask for all heads is mask[:, None]"),
        ((8, 12, 12), "; a mask for each head is mask.reshape([2, 4, 12, 12])"),
        ((4, 4), "; are q, k and v [B, S, H, D]? Then pass x.transpose(1, 2)"),
        ((13, 13), ""),
    ],
)
def test_a_mask_of_a_known_shape_is_answered_with_the_way_to_pass_it(
    shape: tuple[int, ...], hint: str
) -> None:
    given = names()
    mask = given["torch"].ones(shape, dtype=bool)
    with pytest.raises(errors.ShapeError) as caught:
        given["attend"](given["q"], given["k"], given["v"], attn_mask=mask)
    assert str(caught.value).endswith(f"got bool{list(shape)}{hint}")
    with pytest.raises(errors.ShapeError) as caught:
        given["attend"](given["q"][0, 0], given["k"][0, 0], given["v"][0, 0], attn_mask=mask)
    assert str(caught.value).endswith(f"got bool{list(shape)}")  # no heads, no hint


@pytest.mark.parametrize(
    ("dtype", "hint"), [("int64", "; cast it with .int()"), ("float32", "")], ids=str
)
def test_bounds_of_another_dtype_are_answered(dtype: str, hint: str) -> None:
    given = names()
    bounds = given["torch"].tensor([0, 5, 12], dtype=getattr(given["torch"], dtype))
    one = given["q"][:1]
    with pytest.raises(errors.DTypeError) as caught:
        given["attend"](one, one, one, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert str(caught.value).endswith(f"got {dtype}[3]{hint}")


def test_bounds_that_miss_tokens_are_not_taken_for_lengths() -> None:
    given = names()
    one, bounds = given["q"][:1], given["torch"].tensor([0, 5, 7]).int()
    with pytest.raises(errors.ArgumentError, match=r"got \[0, 5, 7\]$"):
        given["attend"](one, one, one, cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def test_a_tensor_for_the_longest_sequence_is_shown_as_one() -> None:
    given = names()
    one, bounds = given["q"][:1], given["torch"].tensor([0, 5, 12]).int()
    longest = given["torch"].tensor(7)
    with pytest.raises(errors.ArgumentError, match=r"an integer from 7 to 12, got tensor\(7\)$"):
        given["attend"](
            one, one, one, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest
        )


def test_the_layout_of_flash_attention_is_asked_about() -> None:
    """[T, H, D] counts as [H, T, D]; on a GPU only the longest sequence can betray it."""
    given = names()
    packed = given["q"][0].transpose(0, 1)
    bounds = given["torch"].tensor([0, 5, 12]).int()
    starts = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    with pytest.raises(errors.ArgumentError) as caught:
        given["attend"](packed, packed, packed, **starts)
    assert str(caught.value).endswith(
        "got [0, 5, 12]; are q, k and v [T, H, D]? Then pass x.transpose(0, 1)"
    )
    one = packed.transpose(0, 1)
    assert given["attend"](one, one, one, **starts).shape == one.shape
    with pytest.raises(errors.ArgumentError) as caught:
        given["attend"](one, one, one, **starts, max_seqlen_q=13)
    assert str(caught.value).endswith("got 13; packed tensors are [1, H, T, D] or [H, T, D]")
