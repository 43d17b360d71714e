"""The text of the recipe: what is read, how it is split and cut."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from sweep import quote_stage
from text import Windows, find_files, read_split


def test_default_text_is_the_standard_library_without_tests():
    files = find_files(None)
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"site-packages", "test"} & set(file.parts) for file in files)
    assert sum(file.stat().st_size for file in files) > 2_000_000


def test_folder_is_read_recursively_in_order(tmp_path):
    for name in ("b.md", "a/c.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [file.name for file in find_files(str(tmp_path))] == ["c.txt", "b.md"]


def test_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="data.path"):
        find_files(str(tmp_path))


def test_split_holds_out_whole_files_where_there_are_many(tmp_path):
    files = [tmp_path / f"{i:02}.txt" for i in range(40)]
    for file in files:
        file.write_text(f"<{file.stem}>")
    train, validation = read_split(files, 0.1)
    assert validation == b"<09>\n<19>\n<29>\n<39>"
    assert train.count(b"<") == 36


def test_split_cuts_the_end_of_few_files_and_skips_binaries(tmp_path):
    text, binary = tmp_path / "a.txt", tmp_path / "b.bin"
    text.write_bytes(b"0123456789")
    binary.write_bytes(b"\0\1")
    assert read_split([text, binary], 0.2) == (b"01234567", b"89")


def test_windows_share_their_border_byte():
    windows = Windows(bytes(range(10)), context=4)
    assert len(windows) == 2
    assert windows[0].tolist() == [0, 1, 2, 3, 4]
    assert windows[1].tolist() == [4, 5, 6, 7, 8]
    assert windows[0].dtype == torch.int64


def test_too_short_text_is_refused():
    with pytest.raises(ValueError, match="4 bytes of text"):
        Windows(b"abcd", context=4)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("stage=3", "stage='3'"),
        ("stage=0,1", "stage='0','1'"),
        ("stage='2'", "stage='2'"),
        ("model=tiny", "model=tiny"),
        ("hydra.run.dir=stage=3", "hydra.run.dir=stage=3"),
    ],
)
def test_quote_stage(argument, expected):
    assert quote_stage(argument) == expected
