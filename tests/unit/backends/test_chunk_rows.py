"""Rows of a chunk: as many as the budget allows, never more than help."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn.backends import common
from adaattn.backends.chunk_rows import choose_chunk_rows, row_bytes
from adaattn.backends.masked import sliding_columns
from adaattn.backends.tiles import CPU_BYTES
from adaattn.planning.cost import estimate
from adaattn.spec import Capability, HeadGroup, Launch, Precision
from adaattn.testing import fake_facts, make_problem

CHUNKED = Capability(
    name="chunked", backend="chunked", skips_hidden=True, num_launches=14, row_bytes=row_bytes
)

WIDE = {"len_q": 4096, "head_dim": 64}
GPU = WIDE | {"device_type": "cuda"}
HALF = {"precision": Precision.BF16}
WINDOW = {"num_heads": 16, "head_dim": 128, "window": (100, 100)}
D512_WINDOW = GPU | HALF | {"len_q": 4204, "head_dim": 512, "num_heads": 6, "window": (303, 0)}
ALIBI = GPU | HALF | {"len_q": 4239, "is_causal": True, "has_alibi": True}


@pytest.mark.parametrize(
    ("values", "budget", "rows"),
    [
        ({"len_q": 8, "len_k": 8}, None, 1024),
        ({"len_q": 4096, "num_heads": 32}, None, 128),
        ({"len_q": 65536, "num_heads": 64, "len_k": 1 << 20}, None, 16),
        ({"len_q": 4096, "num_heads": 1}, 32768 + 12 * 4096 * 64, 64),
        ({"len_q": 4096, "num_heads": 1}, 16384 + 12 * 4096 * 64, 64),
        ({"len_q": 4096, "num_heads": 1}, 16384 + 12 * 4096 * 64 - 1, 32),
        ({"len_q": 4096, "num_heads": 1}, 16384 + 12 * 4096, 1),
        ({"len_q": 4096, "num_heads": 1}, 0, 1),
        (GPU | {"num_heads": 1, "window": (5, -1)}, None, 32768),
        (GPU | WINDOW, None, 512),
        (GPU | WINDOW | HALF, None, 2048),
        (GPU | HALF | {"num_heads": 128, "head_dim": 128, "is_causal": True}, None, 1024),
        (GPU | {"num_heads": 32, "head_dim": 128, "is_causal": True}, None, 512),
        (GPU | {"num_heads": 32, "window": (3000, 0), "requires_grad": True}, None, 32768),
        (D512_WINDOW, None, 1024),
        (D512_WINDOW | {"requires_grad": True}, None, 8192),
        (ALIBI | {"num_heads": 11, "batch": 3, "requires_grad": True}, None, 8192),
        (WIDE | {"num_heads": 1, "window": (300, 0)}, None, 128),
        (WIDE | {"num_heads": 1, "window": (300, 0), "requires_grad": True}, None, 256),
        (WIDE | {"num_heads": 64, "window": (300, 0)}, None, 64),
        (WIDE | {"num_heads": 1, "window": (74, 0), "len_q": 300}, None, 1024),
        (WIDE | {"num_heads": 64, "window": (20, 20), "len_q": 300}, None, 64),
        (WIDE | {"num_heads": 1, "window": (10, 0), "len_q": 1475}, None, 128),
        (WIDE | {"num_heads": 8, "is_causal": True, "requires_grad": True}, None, 512),
        (WIDE | {"num_heads": 8, "is_causal": True, "len_q": 1024}, None, 64),
        (WIDE | {"num_heads": 8}, None, 512),
        ({"len_q": 4, "len_k": 0, "num_heads": 0}, None, 1024),
    ],
)
def test_rows_of_a_chunk(values: dict[str, object], budget: int | None, rows: int) -> None:
    assert choose_chunk_rows(make_problem(**values), budget) == rows


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({"num_heads": 1, "window": (300, 0)}, (128, 256)),
        ({"num_heads": 1, "window": (300, 0), "requires_grad": True}, (256, 1024)),
        ({"num_heads": 1, "window": (300, 0), "precision": Precision.FP32}, (128, 128)),
        ({"num_heads": 4, "is_causal": True, "softcap": 30.0}, (256, 1024)),
    ],
)
def test_chunks_have_more_rows_where_products_go_by_tiles(
    values: dict[str, Any], rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows take less time there, and a chunk takes as long as elsewhere."""
    problem = make_problem(**{**WIDE, **HALF, **values})
    amx = fake_facts("cpu_amx")
    for cpu, expected in zip((replace(amx, has_tiles=False), amx), rows, strict=True):
        monkeypatch.setattr(common, "_CPU", cpu)
        assert choose_chunk_rows(problem, None) == expected


@pytest.mark.parametrize(
    ("precision", "length", "cut"),
    [(Precision.BF16, 114, False), (Precision.BF16, 256, True), (Precision.FP32, 114, True)],
)
def test_a_window_in_16_bits_is_cut_where_it_pays_for_copying_keys(
    precision: Precision, length: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks of 114 tokens took up to 1.3 times as long as one."""
    monkeypatch.setattr(common, "_CPU", replace(fake_facts("cpu_amx"), has_tiles=False))
    sizes = {"batch": 6, "num_heads": 6, "num_kv_heads": 6, "len_q": length, "len_k": length}
    problem = make_problem(
        **sizes, head_dim=128, is_causal=True, window=(12, 0), has_sinks=True, precision=precision
    )
    assert (choose_chunk_rows(problem, None) < length) is cut


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 32),
    len_q=st.integers(1, 20000),
    len_k=st.integers(1, 20000),
    budget=st.integers(0, 1 << 30),
)
def test_a_chunk_fits_every_budget_that_one_row_fits(
    batch: int, heads: int, len_q: int, len_k: int, budget: int
) -> None:
    """The rows' own statistics were once left out, and a budget just below refused the plan."""
    problem = make_problem(batch=batch, num_heads=heads, len_q=len_q, len_k=len_k)

    def workspace(rows: int) -> int:
        group = HeadGroup(capability="chunked", launch=Launch(chunk_rows=rows))
        return estimate(problem, CHUNKED, group, fake_facts("cpu")).workspace_bytes

    chosen = choose_chunk_rows(problem, budget)
    assert workspace(chosen) <= budget or chosen == 1
    assert chosen == 1024 or 2 * chosen > len_q or workspace(2 * chosen) > budget


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({"is_causal": True, "len_q": 4096, "len_k": 4096}, 512),
        ({"is_causal": True, "len_q": 8192, "len_k": 8192}, 256),
        ({"len_q": 4096, "len_k": 4096}, 256),
        ({"len_q": 65536, "len_k": 65536}, 1024),
    ],
    ids=["causal", "longer", "not causal", "none is small enough"],
)
def test_chunks_of_alibi_on_a_cpu_share_a_tile_where_it_is_small_enough(
    values: dict[str, int | bool], rows: int
) -> None:
    problem = make_problem(has_alibi=True, num_heads=8, num_kv_heads=8, head_dim=64, **values)
    found = choose_chunk_rows(problem, None)
    assert found <= rows
    columns = len(sliding_columns(problem, found))
    assert (8 * found * columns * 4 <= CPU_BYTES) == (values["len_q"] < 65536)


@pytest.mark.parametrize(
    ("heads", "length", "training", "rows"),
    [(4, 6371, False, 2048), (4, 6371, True, 8192), (32, 8192, False, 512), (32, 8192, True, 512)],
)
@pytest.mark.parametrize(
    "values", [{"has_sinks": True}, {"softcap": 9.0}], ids=["sinks", "softcap"]
)
def test_scores_written_on_a_gpu_take_gigabytes_for_the_host_is_slow(
    values: dict[str, Any], heads: int, length: int, training: bool, rows: int
) -> None:
    """They were chunks of 64 and 512 rows, 7 times as slow as attention written out."""
    problem = make_problem(
        num_heads=heads,
        len_q=length,
        head_dim=64,
        is_causal=True,
        requires_grad=training,
        device_type="cuda",
        **values,
    )
    assert choose_chunk_rows(problem, None) == rows
    limited = choose_chunk_rows(problem, 256 << 20)
    assert limited < rows and limited * row_bytes(problem) <= 256 << 20
