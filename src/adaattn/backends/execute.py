"""Runs a plan: slices the heads of each group, casts as its scheme says, joins the results."""

from dataclasses import replace

import torch

from adaattn._dtypes import torch_dtype
from adaattn._transfer import on_device
from adaattn.backends.interface import Result, Tensors, combine
from adaattn.backends.registry import load
from adaattn.spec import AttentionProblem, HeadGroup, Plan

__all__ = ["execute", "run_group", "slice_heads"]


def execute(tensors: Tensors, problem: AttentionProblem, plan: Plan) -> Result:
    """Return attention as ``plan`` says.

    Args:
        tensors: canonical tensors.
        problem: simplified; it describes ``tensors``.
        plan: its groups cover each query head once.
    """
    if len(plan.groups) == 1:
        return run_group(tensors, problem, plan.groups[0])
    parts = []
    order: list[int] = []
    for group in plan.groups:
        part, part_problem = slice_heads(tensors, problem, group.heads)
        parts.append(run_group(part, part_problem, replace(group, heads=())))
        order.extend(group.heads)
    inverse = torch.tensor(sorted(range(len(order)), key=order.__getitem__))
    inverse = on_device(inverse, tensors.query.device)
    return combine(parts, lambda columns: torch.cat(columns, dim=1).index_select(1, inverse))


def run_group(tensors: Tensors, problem: AttentionProblem, group: HeadGroup) -> Result:
    """Return attention of all heads of ``tensors`` by one executor, in its scheme's format."""
    executor = load(group.capability)
    precision = group.scheme.inputs
    if precision is problem.precision:
        return executor(tensors, problem, group)
    dtype = torch_dtype(precision)
    cast = replace(tensors, query=tensors.query.to(dtype), kv=tensors.kv.to(dtype))
    lower = replace(problem.without_layout(), precision=precision, sdpa_default="")
    result = executor(cast, lower, group)
    return replace(result, output=result.output.to(tensors.query.dtype))


def slice_heads(
    tensors: Tensors, problem: AttentionProblem, heads: tuple[int, ...]
) -> tuple[Tensors, AttentionProblem]:
    """Return some query heads as a problem of their own.

    When they are whole groups of key heads the grouping is kept; else each query head gets
    its own copy of its key head.
    """
    device = tensors.query.device
    size = problem.group_size
    kv_of = [head // size for head in heads]
    kv_heads = sorted(set(kv_of))
    whole = [kv * size + member for kv in kv_heads for member in range(size)] == list(heads)
    rows = on_device(torch.tensor(heads), device)
    cols = on_device(torch.tensor(kv_heads if whole else kv_of), device)
    mask = tensors.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask.index_select(1, rows)
    part = replace(
        tensors,
        query=tensors.query.index_select(1, rows),
        kv=tensors.kv.of_heads(cols),
        mask=mask,
        mask_given=None,
        blocks=None if tensors.blocks is None else tensors.blocks.of_heads(rows),
        head_terms=None if tensors.head_terms is None else tensors.head_terms.of_heads(rows),
        sinks=None if tensors.sinks is None else tensors.sinks.index_select(0, rows),
        alibi_slopes=(
            None if tensors.alibi_slopes is None else tensors.alibi_slopes.index_select(-1, rows)
        ),
    )
    return part, replace(
        problem.without_layout(),
        num_heads=len(heads),
        num_kv_heads=len(cols),
        mask_shape=tuple(mask.shape) if mask is not None else (),
        sdpa_default="",
    )
