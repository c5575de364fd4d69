"""What grammars make of JSON-Schema-Test-Suite: `python -m tests.frontend.schema_suite FOLDER`.

FOLDER has the suite's files of one draft, such as `tests/draft2020-12`. A schema is refused by
name, or its grammar is right where it takes what is valid and nothing that is not. A grammar may be
narrower than its schema: it writes properties in the schema's order, and no white space but its
own. It is wrong if it takes what is not valid.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.structured.grammar import json_schema_grammar, made_grammar
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import resolve


class Suite:
    """Counts what becomes of the cases of a folder."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(resolve("smollm2-135m-instruct"))
        self._words = tokenizer.backend
        self._vocabulary = TextCodec(tokenizer).vocabulary().matching([2])
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []

    def read(self, file: Path) -> None:
        """Try all cases of a file."""
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            try:
                grammar = made_grammar(lambda schema=schema: json_schema_grammar(schema), "schema")
            except FieldError as error:
                self.counts["refused schemas"] += 1
                self.counts["refused cases"] += len(group["tests"])
                self.reasons[str(error).partition("served: ")[2][:60]] += 1
                continue
            self.counts["served schemas"] += 1
            for test in group["tests"]:
                taken = self._takes(grammar, test["data"])
                self._count(taken, test["valid"], f"{file.stem}: {group['description']}", test)

    def _count(self, taken: bool, valid: bool, name: str, test: dict[str, Any]) -> None:
        kind = "right" if taken == valid else "narrower" if valid else "wrong"
        self.counts[kind] += 1
        if kind == "wrong":
            self.wrong.append(f"{name}: {test['description']}: {json.dumps(test['data'])[:80]}")

    def _takes(self, grammar: str, data: Any) -> bool:
        matcher = matcher_of(self._vocabulary, grammar)
        text = json.dumps(data, ensure_ascii=False)
        ids = self._words.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def main() -> int:
    suite = Suite()
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        suite.read(file)
    print(dict(suite.counts))
    for reason, count in suite.reasons.most_common(40):
        print(f"refused {count}: {reason}")
    print(*[f"WRONG {each}" for each in suite.wrong], sep="\n")
    return bool(suite.wrong)


if __name__ == "__main__":
    sys.exit(main())
