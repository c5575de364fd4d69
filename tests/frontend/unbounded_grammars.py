"""The program that makes grammars, without its bound on rules: a chain of them ends its stack."""

from twolane.frontend import sandboxed
from twolane.frontend.structured import grammar
from twolane.frontend.structured.worker import set_up

if __name__ == "__main__":
    grammar.MAX_RULES = 10**9
    sandboxed.run(set_up)
