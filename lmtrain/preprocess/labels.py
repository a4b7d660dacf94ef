"""Whether the rows of token ids of a source have labels, which decides how its cache is written."""

from collections.abc import Sequence

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat, TokensFormat
from lmtrain.preprocess.sources import AnySource
from lmtrain.preprocess.token_sources import TokenSource


def has_labels(sources: Sequence[AnySource], config: DataConfig, vocab_size: int) -> bool:
    """Whether documents have targets: conversations and completions do, and token ids if their first row has labels.

    Raises `UserError` if some files of token ids have targets and others do not.
    """
    if not isinstance(config.format, TokensFormat):
        return not isinstance(config.format, TextFormat)
    in_place = {source.label: source.info.targets is not None for source in sources if isinstance(source, TokenSource)}
    rows = [source for source in sources if not isinstance(source, TokenSource)]
    found = in_place | ({rows[0].label: _first_has_labels(rows[0], config, vocab_size)} if rows else {})
    if len(set(found.values())) > 1:
        labelled, other = (next(name for name, value in found.items() if value is wanted) for wanted in (True, False))
        raise UserError(f"{labelled} has labels, but {other} has none: make them two sources in data.configs")
    return any(found.values())


def _first_has_labels(source: AnySource, config: DataConfig, vocab_size: int) -> bool:
    from lmtrain.preprocess.documents import DocumentReader
    from lmtrain.preprocess.record_reader import record_reader
    from lmtrain.preprocess.records import TokenizedText

    reader = DocumentReader(
        source,
        record_reader(config, vocab_size),
        skip_bad=config.on_bad_record == "skip",
        max_document_bytes=config.max_document_bytes,
    )
    _, first = next(iter(reader), (0, None))
    return isinstance(first, TokenizedText) and first.targets is not None
