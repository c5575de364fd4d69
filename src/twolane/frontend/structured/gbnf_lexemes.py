"""Converts GBNF to Lark, with lexemes where that allows the same texts, else character by
character.

llguidance's parser reads lexemes, each as long as it can be, while GBNF has no such rule: after
`word ::= [a-z]+` an "x" may follow. A grammar is safe to read by lexemes if no lexeme could go on
with a character that may also follow it. Any other is written with lexemes of one character, which
takes the parser about ten times as long.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    resolve,
)

from twolane.frontend.structured.ecma import LAST, others

Ranges = tuple[tuple[int, int], ...]
"""Characters, as inclusive ranges of code points."""
CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\(.)|(.)", re.S)
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
MAX_PLACES = 1000
"""Most character positions for which a grammar's lexemes are compared."""
MAX_LOOKS = 200_000
"""Most comparisons of character ranges, and most steps of computing what may follow what: each
takes some tenths of a second."""


@dataclass
class Lexeme:
    """A lexeme, as a position automaton."""

    chars: list[Ranges] = field(default_factory=list)
    """Characters that may be at each position."""
    follow: list[set[int]] = field(default_factory=list)
    """Positions that may follow each position."""
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    nullable: bool = False
    nodes: int = 0
    """Number of nodes, those of a rule once per reference."""

    def place(self, chars: Ranges) -> int:
        """Add a position.

        Raises:
            TooManyPlaces: there are too many.
        """
        if len(self.chars) == MAX_PLACES:
            raise TooManyPlaces
        self.chars.append(chars)
        self.follow.append(set())
        return len(self.chars) - 1


class TooManyPlaces(Exception):
    """The lexemes are too long or too many to be compared."""


def lark_of_gbnf(text: str) -> str:
    """Return a GBNF grammar in Lark's format that allows the same texts."""
    rules = plainly_named(GrammarParser().parse(text))
    resolve(rules)
    try:
        whole = reads_by_lexemes(rules)
    except (TooManyPlaces, RecursionError):
        whole = False
    return lark_text(rules, whole=whole)


def plainly_named(rules: Mapping[str, RuleNode]) -> dict[str, RuleNode]:
    """Return rules with names that `resolve` does not confuse: no grammar has a space in one."""
    names = {name: f"rule {place}" for place, name in enumerate(rules) if name != "root"}
    for rule in rules.values():
        rule.name = names.get(rule.name, rule.name)
        todo: list[ASTNode] = [rule]
        while todo:
            node = todo.pop()
            todo += node.children()
            if isinstance(node, RuleRefNode):
                node.name = names.get(node.name, node.name)
    return {rule.name: rule for rule in rules.values()}


def lark_text(rules: Mapping[str, RuleNode], *, whole: bool) -> str:
    """Return a grammar in Lark's format.

    Args:
        rules: the rules of the grammar, resolved.
        whole: true if lexemes are as long as they can be; else they have one character.
    """
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    names = {
        id(rule): f"TERMINAL_{place}" if whole and rule.rule_is_terminal else f"rule_{place}"
        for place, rule in enumerate(ordered)
    }
    names[id(rules["start"])] = "start"

    def written(node: ASTNode) -> str:
        match node:
            case LiteralNode() if not whole and node.value:
                return "(" + CHARACTER.sub(r'"\g<0>" ', node.value) + ")"
            case RuleRefNode():
                return names[id(node.target)]
            case RepetitionNode():
                most = "" if node.max_times is None else node.max_times
                return f"({written(node.node)}){{{node.min_times},{most}}}"
            case SequenceNode() if node.nodes:
                return f"({' '.join(map(written, node.nodes))})"
            case AlternativeNode():
                return f"({' | '.join(map(written, node.alternatives))})"
        return str(node)

    lines = [f"{names[id(rule)]}: {written(rule.alternatives)}" for rule in ordered]
    return "\n".join(["%llguidance {}", *lines])


def reads_by_lexemes(rules: Mapping[str, RuleNode]) -> bool:
    """Return whether no lexeme of a grammar could continue with what may follow it.

    Raises:
        TooManyPlaces: it cannot be decided in bounded time.
    """
    grammar, comparison = LexemeGrammar(rules), Comparison()
    for key, lexeme in grammar.lexemes.items():
        others = [grammar.lexemes[other] for other in grammar.follow[key]]
        following = {other.chars[place] for other in others for place in other.first}
        if any(comparison.goes_on(lexeme, other, following) for other in grammar.lexemes.values()):
            return False
    return True


class Comparison:
    """Compares the lexemes of a grammar in bounded time."""

    def __init__(self) -> None:
        self._left = MAX_LOOKS

    def goes_on(self, lexeme: Lexeme, other: Lexeme, following: Collection[Ranges]) -> bool:
        """Return whether `other` may begin with all of `lexeme` and continue with what follows.

        Raises:
            TooManyPlaces: there are too many pairs of places.
        """
        todo = self._overlapping(lexeme, lexeme.first, other, other.first)
        seen = set(todo)
        while todo:
            mine, its = todo.pop()
            if mine in lexeme.last and any(
                self._overlap(other.chars[place], chars)
                for place in other.follow[its]
                for chars in following
            ):
                return True
            ahead = self._overlapping(lexeme, lexeme.follow[mine], other, other.follow[its])
            new = set(ahead) - seen
            seen |= new
            todo += new
        return False

    def _overlapping(
        self, one: Lexeme, ones: set[int], other: Lexeme, others: set[int]
    ) -> list[tuple[int, int]]:
        """Return the pairs of positions that may hold the same character."""
        pairs = product(ones, others)
        return [pair for pair in pairs if self._overlap(one.chars[pair[0]], other.chars[pair[1]])]

    def _overlap(self, one: Ranges, other: Ranges) -> bool:
        """Return whether two sets have a character in common."""
        self._left -= len(one) * len(other)
        if self._left < 0:
            raise TooManyPlaces
        return any(a <= d and c <= b for a, b in one for c, d in other)


class LexemeGrammar:
    """The lexemes of a grammar, and which may follow which.

    Args:
        rules: the rules of the grammar, resolved.

    Raises:
        TooManyPlaces: there are too many lexemes.
    """

    def __init__(self, rules: Mapping[str, RuleNode]) -> None:
        self.lexemes: dict[int, Lexeme] = {}
        """Lexemes by node id."""
        self.follow: dict[int, set[int]] = {}
        """Lexemes that may follow a lexeme or a rule, by node id."""
        self._places = 0
        self._first: dict[int, set[int]] = {}
        self._nullable: dict[int, bool] = {}
        self._rules = [rule for rule in rules.values() if not rule.rule_is_terminal]
        for rule in self._rules:
            self._first[id(rule)], self.follow[id(rule)] = set(), set()
            self._nullable[id(rule)] = False
        self._settle()

    def _settle(self) -> None:
        """Compute first, nullable and follow sets to their fixed point.

        Raises:
            TooManyPlaces: there is too much of it.
        """
        before, work = -1, 0
        while before != (now := self._found()):
            before, work = now, work + now
            if work > MAX_LOOKS:
                raise TooManyPlaces
            for rule in reversed(self._rules):  # rules come before those that they refer to
                self._first[id(rule)] |= self._firsts(rule.alternatives)
                self._nullable[id(rule)] |= self._empty(rule.alternatives)
            for rule in self._rules:
                self._walk(rule.alternatives, self.follow[id(rule)])

    def _found(self) -> int:
        sets = (*self._first.values(), *self.follow.values())
        return sum(map(len, sets)) + sum(self._nullable.values())

    def _lexeme(self, node: ASTNode) -> int | None:
        """Return the id of the lexeme at a node; None: it is none."""
        target: ASTNode = node
        if isinstance(node, RuleRefNode) and node.target is not None and node.is_terminal():
            target = node.target
        if not isinstance(target, RuleNode | LiteralNode | RegexNode):
            return None
        if id(target) not in self.lexemes:
            lexeme = Lexeme()
            lexeme.nullable, lexeme.first, lexeme.last = built(target, lexeme)
            self.lexemes[id(target)], self.follow[id(target)] = lexeme, set()
            self._places += len(lexeme.chars)
            if self._places > MAX_PLACES:
                raise TooManyPlaces
        return id(target)

    def _empty(self, node: ASTNode) -> bool:
        if (key := self._lexeme(node)) is not None:
            return self.lexemes[key].nullable
        match node:
            case RuleRefNode():
                return self._nullable[id(node.target)]
            case RepetitionNode():
                return node.min_times == 0 or self._empty(node.node)
            case AlternativeNode():
                return any(map(self._empty, node.alternatives))
        return all(map(self._empty, node.children()))

    def _firsts(self, node: ASTNode) -> set[int]:
        if (key := self._lexeme(node)) is not None:
            return {key}
        if isinstance(node, RuleRefNode):
            return self._first[id(node.target)]
        found: set[int] = set()
        for child in node.children():
            found = found | self._firsts(child)
            if isinstance(node, SequenceNode) and not self._empty(child):
                break
        return found

    def _walk(self, node: ASTNode, after: set[int]) -> None:
        """Add to the follow sets of a node's lexemes and rules, which `after` may follow."""
        if (key := self._lexeme(node)) is not None:
            self.follow[key] |= after
        elif isinstance(node, RuleRefNode):
            self.follow[id(node.target)] |= after
        elif isinstance(node, SequenceNode):
            for child in reversed(node.nodes):
                self._walk(child, after)
                after = self._firsts(child) | (after if self._empty(child) else set())
        else:
            if isinstance(node, RepetitionNode) and node.max_times != 1:
                after = after | self._firsts(node.node)
            for child in node.children():
                self._walk(child, after)


def built(node: ASTNode, lexeme: Lexeme) -> tuple[bool, set[int], set[int]]:
    """Add a node's positions to a lexeme; return whether it may be empty, and its first and last
    positions.

    Raises:
        TooManyPlaces: there are too many.
    """
    lexeme.nodes += 1
    # Most nodes of a lexeme.
    if lexeme.nodes > 10_000:
        raise TooManyPlaces
    match node:
        case RegexNode():
            place = lexeme.place(class_ranges(node.rx))
            return False, {place}, {place}
        case LiteralNode():
            numbers = [character_number(match) for match in CHARACTER.finditer(node.value)]
            places = [lexeme.place(((number, number),)) for number in numbers]
            return in_a_row(lexeme, [(False, {place}, {place}) for place in places])
        case SequenceNode():
            return in_a_row(lexeme, [built(child, lexeme) for child in node.nodes])
        case RepetitionNode():
            empty, first, last = built(node.node, lexeme)
            if node.max_times != 1:
                for place in last:
                    lexeme.follow[place] |= first
            return empty or node.min_times == 0, first, last
        case RuleRefNode():
            assert node.target is not None
            return built(node.target, lexeme)
    parts = [built(child, lexeme) for child in node.children()]
    nullable = any(part[0] for part in parts)
    return nullable, set().union(*(p[1] for p in parts)), set().union(*(p[2] for p in parts))


def in_a_row(
    lexeme: Lexeme, parts: Sequence[tuple[bool, set[int], set[int]]]
) -> tuple[bool, set[int], set[int]]:
    """Concatenate parts of a lexeme."""
    nullable, first, last = True, set[int](), set[int]()
    for empty, begins, ends in parts:
        for place in last:
            lexeme.follow[place] |= begins
        first = first | begins if nullable else first
        last = last | ends if empty else ends
        nullable = nullable and empty
    return nullable, first, last


def class_ranges(text: str) -> Ranges:
    """Return the characters of a class or a dot of a regular expression."""
    if text == ".":
        return ((0, 9), (11, LAST))
    inside = text[1:-1]
    negated = inside.startswith("^")
    characters = [*CHARACTER.finditer(inside.removeprefix("^"))]
    ranges, place = [], 0
    while place < len(characters):
        low = high = character_number(characters[place])
        if place + 2 < len(characters) and characters[place + 1][0] == "-":
            high = character_number(characters[place + 2])
            place += 2
        ranges.append((low, high))
        place += 1
    return tuple(others(ranges) if negated else ranges)


def character_number(match: re.Match[str]) -> int:
    """Return the code point of a match of `CHARACTER`."""
    if match[1]:
        return int(match[1], 16)
    return ord(NAMED.get(match[2], match[2]) if match[2] else match[3])
