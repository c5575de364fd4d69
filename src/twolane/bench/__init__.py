"""Benchmarks of servers: the load client, the search for goodput, and reports.

It talks to any server with OpenAI's HTTP interface, Twolane's or not, and imports nothing of the
engine. Times are seconds in code and milliseconds in what is printed and saved.
"""
