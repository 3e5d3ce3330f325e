from pathlib import Path

import pytest

from adaattn.errors import AssetError
from adaattn.evaluation.corpus import SHIPPED_TEXTS, load_text


@pytest.mark.parametrize("name", SHIPPED_TEXTS)
def test_shipped_texts_are_long_enough_to_evaluate_on(name: str) -> None:
    assert len(load_text(name)) > 500_000


def test_a_file_is_read_as_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("grün".encode())
    assert load_text(str(path)) == "grün"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected one of opticks, or a readable file, got No such file"),
        (b"\xff\xfe\xff", "expected a UTF-8 file"),
        (b" \n ", "expected some words, got an empty file"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AssetError, match=message):
        load_text(str(path))


def test_a_folder_is_not_a_text(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="or a readable file, got Is a directory"):
        load_text(str(tmp_path))
