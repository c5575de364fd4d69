"""`twolane doctor MODEL`: what is read of a model's files, and where each thing comes from."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twolane.common.printable import printable
from twolane.engine.config import LEAST_RUNNING, MOST_RUNNING, RUNNING_TOKENS
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.crosscheck import PROBES, disagreement
from twolane.frontend.text.template import ChatTemplate
from twolane.frontend.text.template_form import TemplateForm
from twolane.frontend.text.tokenizer import (
    Declared,
    ModelTokenizer,
    TokenizerFile,
    add_note,
    load_both,
)
from twolane.model.load.configs import declared_eos
from twolane.model.load.hub import ModelSource, resolve
from twolane.model.page_layout import PageLayout
from twolane.model.spec import UnsupportedModel


def report(name: str, tokens: str | None, chat_template: str | None) -> None:
    """Print what is read of a model, or the tokens of a text.

    Args:
        name: Name of the model.
        tokens: The text whose tokens are printed.
        chat_template: File of a chat template in place of the model's own.

    Raises:
        ValueError: there is no such model, it is not served, or its tokenizer or that file cannot
            be read.
        PullError: it could not be fetched.
    """
    source = resolve(name)
    if tokens is None:
        [*formats(source)]  # before the tokenizer, so that the reason is the one of `serve`
    if source.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer")
    source = source.with_chat_template(chat_template)
    file, tokenizer = load_both(source)
    rows = describe(source, file, tokenizer)
    if tokens is not None:
        rows = pieces(TextCodec(tokenizer), tokens)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    if table.row_count:
        Console().print(table)


def pieces(codec: TextCodec, text: str) -> Iterator[Sequence[str]]:
    """Yield id, name and text of each token of a text, as /tokenize has them."""
    ids = codec.encode(text)
    for token, name in zip(ids, codec.token_names(ids), strict=True):
        yield str(token), name, repr(codec.token_bytes(token).decode(errors="replace"))


def describe(
    source: ModelSource, file: TokenizerFile, tokenizer: ModelTokenizer | None
) -> Iterator[Sequence[str]]:
    """Yield the rows of the report: what, its value, where it comes from."""
    yield "model", source.name, str(source.path)
    yield from formats(source)
    if tokenizer is None:
        yield "tokenizer", "none: prompts are token ids", file.origin
        return
    size = tokenizer.backend.get_vocab_size()
    yield "tokenizer", f"{type(tokenizer.backend.model).__name__}, {size:,} tokens", file.origin
    yield "BOS", "none", file.origin
    if file.bos is not None:
        yield "BOS", shown(file.bos), file.bos.source
    for end in ends(source, file, tokenizer):
        yield "EOS", shown(end), end.source
    yield from templates(file, tokenizer)
    for note in file.notes:
        yield "note", note, ""
    if source.kind == "dir" and file.origin == "tokenizer.json" and source.tokenizer is not None:
        try:
            difference = disagreement(source.tokenizer, tokenizer.backend)
        except ValueError as error:
            yield "transformers", "has no opinion", str(error)
            return
        if difference is not None:
            add_note(source, difference)
        yield "transformers", difference or f"cuts {len(PROBES)} texts alike", ""


def formats(source: ModelSource) -> Iterator[Sequence[str]]:
    """Yield the rows about how weights and KV cache are stored.

    Raises:
        UnsupportedModel: the model is not served.
    """
    try:
        spec, stored = source.facts.spec, source.facts.quantization
    except UnsupportedModel:
        raise
    except ValueError as error:  # the tokenizer may be read nevertheless
        yield "KV cache", "not known", str(error)
        return
    if source.kind == "dir":
        named = "not quantised" if stored is None else stored.name
        yield "weights", named, "quantization_config of config.json"
    wide, thin = (spec.kv_bytes_per_token(spec.kv_itemsize(c, 2)) for c in ("auto", "fp8"))
    yield "KV cache", f"{wide:,} bytes a token in 16 bits", "--kv-cache-dtype auto"
    yield "", f"{thin:,} bytes a token in FP8", "--kv-cache-dtype fp8"
    if (layout := PageLayout.of(spec)).window:
        page = wide * layout.layers // len(spec.kv_layers)
        within = f"{page * (1 + layout.window_tables):,} within the last {layout.window:,}"
        yield "", f"{page:,} bytes a token of a request, {within}", "windows, in 16 bits"
    if spec.state is not None:
        states = f"{spec.state_bytes(2):,} bytes a request in {spec.linear_layers} layers"
        yield "states", states, "--max-running"
    else:
        each = f"one for each {RUNNING_TOKENS * wide / 2**20:,.0f} MiB of a GPU's KV pool"
        yield "at once", f"{each}, {LEAST_RUNNING} to {MOST_RUNNING:,}", "--max-running"
    if source.kind == "dir" and source.path is not None and source.facts.family.stores_mtp:
        yield from further_tokens(source)


def further_tokens(source: ModelSource) -> Iterator[Sequence[str]]:
    """Yield the row about the tensors that predict further tokens, if the files have any.

    Raises:
        ValueError: they, or the files, are broken.
    """
    from twolane.model.load.mtp import check_predictor
    from twolane.model.load.opened import open_tensors

    with ExitStack() as stack:
        found = check_predictor(*open_tensors(source, source.facts, stack))
    if found is not None:
        size = f"{found.tensors:,} tensors, {found.bytes / 1e9:.2f} GB"
        what = f"{found.layers} layer{'s' * (found.layers > 1)} in {size}: sound, not loaded"
        yield "MTP", what, "mtp.*"


def shown(token: Declared) -> str:
    """Return a token as text."""
    return f"{token.id} {token.token!r}"


def ends(source: ModelSource, file: TokenizerFile, tokenizer: ModelTokenizer) -> list[Declared]:
    """Return every token that ends an answer, once for each place that declares it."""
    declared = []
    if source.kind == "dir" and source.path is not None:
        for place, ids in declared_eos(source.path).items():
            declared += [Declared(i, tokenizer.backend.id_to_token(i) or "", place) for i in ids]
    return declared + file.ends


def templates(file: TokenizerFile, tokenizer: ModelTokenizer) -> Iterator[Sequence[str]]:
    """Yield the rows about the chat templates."""
    if tokenizer.chat_template is None:
        yield "template", "none: no chat", ""
    else:
        yield "template", "", file.template_source or ""
        yield from form_rows(tokenizer, tokenizer.chat_template, file.form)
    if tokenizer.tool_template is not None:
        yield "tool template", "for conversations with tools", "tool_use"
        yield from form_rows(tokenizer, tokenizer.tool_template, file.tool_form)


def form_rows(
    tokenizer: ModelTokenizer, source: str, form: TemplateForm | None
) -> Iterator[Sequence[str]]:
    """Yield the rows about one chat template."""
    if form is None:
        yield "", "broken: no chat", ""
        return
    yield "  text", ", ".join(form.text_roles) or "of no role", "roles whose content is text"
    yield "  parts", ", ".join(form.part_roles) or "of no role", "roles whose content is parts"
    calls = "not shown"
    if form.arguments is not None:
        beside = {"null": form.null_content, "empty text": form.empty_content}
        contents = " or ".join(name for name, taken in beside.items() if taken)
        calls = f"arguments as {form.arguments}, beside {contents}"
    elif form.shows_calls:
        calls = "messages of their own" if form.named_calls else "part of the content"
    yield "  tools", "shown" if form.shows_tools else "told of in a message, as Hermes' are", ""
    yield "  tool calls", calls, ""
    yield "  developer", "a role of its own" if form.developer else "read as system", ""
    yield "  turn ends", repr(form.turn_end), ""
    variables = ChatTemplate(source, tokenizer.special_tokens, form).variables
    yield "  variables", ", ".join(sorted(variables)) or "none", "chat_template_kwargs"
