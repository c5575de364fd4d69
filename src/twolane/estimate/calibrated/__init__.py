"""The calibrated estimator: a linear base for each level and a learnt residual."""
