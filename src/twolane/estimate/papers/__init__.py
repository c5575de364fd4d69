"""The estimators of the papers: rooflines, solo-run models and the contention guard."""
