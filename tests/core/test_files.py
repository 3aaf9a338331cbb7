"""Files that are written whole, and what is written to where no file can be."""

from __future__ import annotations

import os
import threading

import pytest

from sharpmax.core.files import write_bytes, write_text


def test_a_link_stays_and_leads_to_what_was_written(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"real.json"}


def test_a_pipe_stays_one(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join()
    assert got == [b"through"]
    assert pipe.is_fifo()


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_bytes(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
