"""Workloads: the requests to send, from traces, published lengths or random draws.

A workload is a list of `traces.TraceRequest`: when a request comes, how long its prompt and its
reply are, and which blocks of its prompt it shares with others. `spec.WorkloadSpec` builds one
from a trace file, a shipped table of lengths or two numbers; `prompts.PromptMaker` turns each
request into token ids. Everything is deterministic for a seed. Times are in seconds.
"""
