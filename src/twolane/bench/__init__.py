"""What came out: the load client, its metrics and the result of a run.

It talks to any server with OpenAI's HTTP interface, ours or not, and imports nothing of the
engine. Times are seconds in code and milliseconds in what is printed and saved.
"""
