"""The systems of the papers: Bullet, Drift, DuetServe and MuxWise."""
