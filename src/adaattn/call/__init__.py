"""One call, from arguments to result: describe, bind, run, observe.

`bind` is the way in: it describes a first call of its kind (`describe`), decides, and keeps a
function for the calls like it. `run` executes; `adapt` does so under an error budget, by the
clock (`ledger`) and by sampled rows (`measure`, `audit`), and remembers in a `history`.
"""
