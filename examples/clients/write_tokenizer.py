"""Write a model's tokenizer into a folder, for clients that want one.

python examples/clients/write_tokenizer.py smollm2-135m-instruct tokenizer
"""

import sys

from transformers import PreTrainedTokenizerFast

from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import resolve

name, folder = sys.argv[1:]
made = load_tokenizer(resolve(name))
clients = PreTrainedTokenizerFast(tokenizer_object=made.backend, **made.special_tokens)
clients.chat_template = made.chat_template
clients.save_pretrained(folder)
