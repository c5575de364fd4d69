"""The baselines: one lane, a fixed split, or both lanes unpartitioned."""
