"""Pure mathematics on tensors: entropy, low rank, quantisation. No decisions are made here."""
