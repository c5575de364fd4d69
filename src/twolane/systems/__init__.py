"""The decisions: each system is a pure function from view and memory to plan."""
