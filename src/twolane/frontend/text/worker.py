"""Runs the tokenizer and chat template of a checkpoint in a sandbox."""

import os
from pathlib import Path

import msgspec

from twolane.frontend import sandboxed
from twolane.frontend.text import jobs
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.tokenizer import load_both
from twolane.model.load.hub import ModelSource

# The threads of the tokenizers library would not be there in a forked process.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def set_up(data: bytes) -> tuple[bytes, sandboxed.Handler]:
    """Load the programs of a checkpoint.

    Raises:
        ValueError: they cannot be read.
    """
    setup = msgspec.msgpack.decode(data, type=jobs.TokenizerSetup)
    source = ModelSource("dir", setup.name, None, Path(setup.tokenizer))
    source = source.with_chat_template(setup.chat_template)
    file, tokenizer = load_both(source)
    codec = TextCodec(tokenizer)
    loaded = jobs.Loaded(
        msgspec.json.encode(file),
        codec.template_source,
        # A template whose format could not be found in time is not tried once more.
        tokenizer is not None and tokenizer.tools_form is not None and codec.shows_tools,
        codec.has_chat_template,
        codec.template_variables(tools=False),
        codec.template_variables(tools=True),
    )

    def handle(job: bytes) -> bytes:
        return msgspec.msgpack.encode(answer(codec, job))

    return msgspec.msgpack.encode(loaded), handle


def answer(codec: TextCodec, job: bytes) -> jobs.Result:
    """Run a job."""
    request = jobs.read_job(job)
    try:
        if isinstance(request, jobs.Decode):
            return jobs.Decoded(
                codec.decode(jobs.unpacked(request.tokens), skip_special_tokens=False)
            )
        if isinstance(request, jobs.Words):
            return jobs.Sequences(tuple(codec.sequences(request.words)))
        if isinstance(request, jobs.Chat):
            tokens = codec.chat(request.messages, **request.options)
        else:
            tokens = codec.encode(request.text, add_special_tokens=request.add_special_tokens)
        return (
            jobs.Encoded(jobs.packed(tokens))
            if request.listing is None
            else listed(codec, tokens, request.listing)
        )
    except TextError as error:
        return jobs.WrongText(str(error), error.param)


def listed(codec: TextCodec, tokens: list[int], listing: jobs.Listing) -> jobs.Listed:
    """Return the lists of tokens that an answer shows."""
    encode = msgspec.json.encode
    names = encode(codec.token_names(tokens)) if listing.names else None
    return jobs.Listed(len(tokens), encode(tokens), names)


def main() -> None:
    """Run in a sandbox."""
    sandboxed.run(set_up)


if __name__ == "__main__":
    main()
