"""Write a model's tokenizer into a folder, for clients that want one.

python examples/clients/write_tokenizer.py smollm2-135m-instruct tokenizer
"""

import sys

from twolane.frontend.text.convert import read
from twolane.model.load.hub import resolve

name, folder = sys.argv[1:]
source = resolve(name)
if source.tokenizer is None:
    sys.exit(f"{name} has no tokenizer")
read(source.tokenizer).save_pretrained(folder)
