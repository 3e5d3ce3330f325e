"""The frozen values that planning reads and writes. No tensors, no logic but validation.

Shape legend, used throughout the package: ``B`` batch, ``Hq`` query heads, ``Hkv``
key and value heads, ``Sq`` query length, ``Sk`` key length, ``D`` head dimension of
queries and keys, ``Dv`` head dimension of values.

Every value here can be printed, compared, hashed, pickled, and sent to other ranks.
"""

from adaattn.spec.capability import Capability, Overhead
from adaattn.spec.decision import Cost, Decision, TraceEntry
from adaattn.spec.enums import (
    Align,
    Aux,
    Feature,
    HeadTerm,
    KVKind,
    MaskKind,
    Method,
    Precision,
    Variant,
    Why,
)
from adaattn.spec.evidence import Cell, Measured, TimingTable
from adaattn.spec.facts import AttentionProblem, HardwareFacts, MethodErrors, Rates, TensorStats
from adaattn.spec.method import METHODS, BlockSparse, Exact, HeadMethod, LowRank
from adaattn.spec.plan import HeadGroup, Launch, Plan
from adaattn.spec.policy import Policy
from adaattn.spec.scheme import Scheme

__all__ = [
    "METHODS",
    "Align",
    "AttentionProblem",
    "Aux",
    "BlockSparse",
    "Capability",
    "Cell",
    "Cost",
    "Decision",
    "Exact",
    "Feature",
    "HardwareFacts",
    "HeadGroup",
    "HeadMethod",
    "HeadTerm",
    "KVKind",
    "Launch",
    "LowRank",
    "MaskKind",
    "Measured",
    "Method",
    "MethodErrors",
    "Overhead",
    "Plan",
    "Policy",
    "Precision",
    "Rates",
    "Scheme",
    "TensorStats",
    "TimingTable",
    "TraceEntry",
    "Variant",
    "Why",
]
