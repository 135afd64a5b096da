"""What the demo model is trained on (scripts/train): the same for the same seed, in rows that begin with a document."""

from __future__ import annotations

from types import SimpleNamespace

from pages import documents, rows
from tokenizer import END, TURN


class Bytes:
    """A tokenizer of bytes."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


def test_documents_are_the_same_for_the_same_seed() -> None:
    texts = documents(7, 40)
    assert texts == documents(7, 40) != documents(8, 40)
    assert all(text.startswith(END) for text in texts)
    assert 0 < sum(TURN in text for text in texts) < 40  # conversations, and plain pages


def test_a_row_begins_with_a_document_and_cuts_only_its_last() -> None:
    texts = documents(7, 40)
    found = rows(Bytes(), texts, 600)
    assert found.shape[1] == 600 and len(found) > 5
    assert all(bytes(row.astype("uint8")).startswith(END.encode()) for row in found)
