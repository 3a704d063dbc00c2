"""What --compute means, and correctness before speed: the float64 reference, the error budget, poisoned and guarded tensors, the oracle, a
contender on one pass."""
