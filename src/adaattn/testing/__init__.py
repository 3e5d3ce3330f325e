"""What the tests and benchmarks of attention code need, shipped and documented.

Random inputs for any problem, the oracle, the one rule that compares numbers, poisoned
memory, wrong results that every comparison must catch, and invented hardware.
"""

from adaattn.backends.reference import attention, positions, visible_keys
from adaattn.testing.compare import (
    Comparison,
    assert_matches,
    assert_results_match,
    assert_within_budget,
    compare,
    head_errors,
)
from adaattn.testing.executors import assert_executor_matches, assert_training_matches
from adaattn.testing.fake_hardware import fake_facts
from adaattn.testing.gradients import (
    assert_gradients_match,
    differentiable,
    gradients_of,
    num_summands,
    term_sizes,
)
from adaattn.testing.inputs import (
    Layout,
    cast_tensors,
    make_errors,
    make_problem,
    make_tensors,
    with_tensors,
)
from adaattn.testing.mutate import mutations
from adaattn.testing.poison import poisoned_memory

__all__ = [
    "Comparison",
    "Layout",
    "assert_executor_matches",
    "assert_gradients_match",
    "assert_matches",
    "assert_results_match",
    "assert_training_matches",
    "assert_within_budget",
    "attention",
    "cast_tensors",
    "compare",
    "differentiable",
    "fake_facts",
    "gradients_of",
    "head_errors",
    "make_errors",
    "make_problem",
    "make_tensors",
    "mutations",
    "num_summands",
    "poisoned_memory",
    "positions",
    "term_sizes",
    "visible_keys",
    "with_tensors",
]
