"""Right before fast: the float64 reference, the error budget, poisoned and guarded tensors, the oracle, and a contender on one pass."""
