"""What is kept of a model file, and when it is not believed."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from strata_client import model_cache
from strata_client.model_cache import open_model
from strata_client.models.base import ModelError
from strata_client.models.gguf_file import ArrayLength, ModelFile, open_model_file
from strata_client.models.qwen3moe_file import check_tensors, read_params
from strata_client.tokenizer import Tokenizer, Vocabulary
from tests.helpers.gguf_builder import DATA, build, load, small_keys, small_tensors

TEXT = "Once upon a time, 17 cats\n\tsat. <|im_end|> é中😀"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were changed just now are kept, too."""
    monkeypatch.setattr(model_cache, "SETTLED_S", -60)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "model.gguf")


def written(path: Path, **changes: object) -> Path:
    path.write_bytes(build(small_keys(**changes), small_tensors()))
    return path


def known(path: Path, directory: Path | None) -> bool:
    """Opens a model; whether that did without reading it."""
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_cache, "open_model_file", lambda path: read.append(path) or open_model_file(path))
        model_file, vocabulary = open_model(str(path), directory)
        with model_file:
            assert model_file.tensors
            assert vocabulary.pre
    return not read


def same(ours: tuple[ModelFile, Vocabulary], theirs: tuple[ModelFile, Vocabulary]) -> None:
    assert ours[0].tensors == theirs[0].tensors
    assert [tensor.type.name for tensor in ours[0].tensors.values()] == [
        tensor.type.name for tensor in theirs[0].tensors.values()
    ]
    assert [(part.path, part.size_bytes) for part in ours[0].files] == [
        (part.path, part.size_bytes) for part in theirs[0].files
    ]
    for name in Vocabulary.__dataclass_fields__:
        assert np.array_equal(getattr(ours[1], name), getattr(theirs[1], name)), name
    for special in (False, True):
        assert Tokenizer(ours[1]).encode(TEXT, special=special) == Tokenizer(theirs[1]).encode(TEXT, special=special)


@pytest.mark.parametrize("name", ["micro", "nano", "specials", "bos", "nobos", "emoji"])
def test_what_is_kept_is_what_was_read(name: str, directory: Path) -> None:
    """The second opening has the same tensors, files, parameters and tokens as the first."""
    path = str(DATA / f"{name}.gguf")
    read = open_model(path, directory)
    kept = open_model(path, directory)
    with read[0], kept[0]:
        same(kept, read)
        params = read_params(kept[0])
        assert params == read_params(read[0])
        assert check_tensors(kept[0], params) == check_tensors(read[0], params)
        for key, value in read[0].metadata.items():
            is_array = isinstance(value, list | np.ndarray)
            assert kept[0].metadata[key] == (ArrayLength(len(value)) if is_array else value)
    assert known(Path(path), directory)


def test_shards_are_known_by_any_of_them(tmp_path: Path, directory: Path) -> None:
    """A model in shards is kept once, whichever is given, and read again when one of them has changed."""
    keys, tensors = load("micro.gguf")
    paths = []
    for n in (0, 1):
        split = {"split.no": n, "split.count": 2, "split.tensors.count": len(tensors)}
        part = tensors[:3] if n == 0 else tensors[3:]
        paths.append(tmp_path / f"m-{n + 1:05}-of-00002.gguf")
        paths[n].write_bytes(build((keys if n == 0 else {}) | split, [t._replace(offset=None) for t in part]))
    assert not known(paths[0], directory)
    assert known(paths[1], directory)
    os.utime(paths[1], ns=(1, 1))
    assert not known(paths[0], directory)
    assert len(list(directory.iterdir())) == 1
    paths[1].unlink()
    with pytest.raises(ModelError, match="this shard of the model is missing"):
        open_model(str(paths[0]), directory)


def test_a_changed_file_is_read_again(path: Path, directory: Path) -> None:
    """A file with other contents is another one, also with its size and time of modification as before."""
    assert not known(path, directory)
    assert known(path, directory)
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"small", b"SMALL"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    model_file, _ = open_model(str(path), directory)
    with model_file:
        assert model_file.metadata["general.name"] == "SMALL"
    replacement = written(path.with_name("other"), block_count=2)
    os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns))
    replacement.rename(path)
    assert not known(path, directory)
    assert known(path, directory)


def test_a_file_that_may_still_change_is_not_kept(path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written just now is read each time: its times might not tell the next change."""
    monkeypatch.setattr(model_cache, "SETTLED_S", 60)
    assert not known(path, directory)
    assert not directory.exists()


def test_other_readers_read_again(path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version of the reading modules kept is not believed."""
    assert not known(path, directory)
    monkeypatch.setattr(model_cache, "_READERS", (*model_cache._READERS[1:], __file__))
    assert not known(path, directory)
    assert known(path, directory)


def test_only_the_user_reads_and_writes_it(path: Path, directory: Path) -> None:
    """The directory is made with mode 0700, entries have 0600, whatever the umask, and nothing else is left there."""
    umask = os.umask(0)
    try:
        known(path, directory)
    finally:
        os.umask(umask)
    assert directory.stat().st_mode & 0o777 == 0o700
    (entry,) = directory.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600


def spoil(entry: Path, how: str) -> None:
    """Makes an entry one that must not be believed."""
    data = entry.read_bytes()
    if how == "group":
        entry.chmod(0o660)
    elif how == "owner":
        os.chown(entry, 12345, -1)
    elif how == "link":
        entry.rename(entry.with_name("elsewhere"))
        entry.symlink_to("elsewhere")
    elif how == "empty":
        entry.write_bytes(b"")
    elif how == "short":
        entry.write_bytes(data[:-1])
    elif how == "zeros":  # after a loss of power
        entry.write_bytes(bytes(len(data)))
    elif how == "directory":
        entry.unlink()
        (entry / "full").mkdir(parents=True)
    elif how == "pipe":
        entry.unlink()
        os.mkfifo(entry)
    else:
        at = int(how)
        entry.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


SPOILED = ("group", "owner", "link", "empty", "short", "zeros", "pipe", "0", "17", "24", "40", "500", "7000", "-2")


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_not_as_it_should_be_is_written_anew(path: Path, directory: Path, how: str) -> None:
    """A damaged entry, or one that somebody else could have written, is as good as none, and replaced."""
    if how == "owner" and os.geteuid():
        pytest.skip("only root gives files away")
    assert not known(path, directory)
    (entry,) = directory.iterdir()
    spoil(entry, how)
    assert not known(path, directory)
    assert known(path, directory)


def test_without_a_place_it_is_read_each_time(path: Path, tmp_path: Path, directory: Path) -> None:
    """No directory, one that cannot be made, or an entry that cannot be replaced, costs time and nothing else."""
    assert not known(path, None)
    (tmp_path / "file").write_bytes(b"")
    assert not known(path, tmp_path / "file" / "models")
    known(path, directory)
    (entry,) = directory.iterdir()
    spoil(entry, "directory")
    assert not known(path, directory)
    assert not known(path, directory)


def test_the_oldest_go(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many entries, and bytes of them, are kept; those go first that were used the longest ago."""
    monkeypatch.setattr(model_cache, "ENTRIES_MAX", 3)
    paths = [written(tmp_path / f"{n}.gguf") for n in range(4)]

    def age() -> None:  # times of files are coarse
        for file in directory.iterdir():
            state = file.stat()
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns - 10**9))

    for path in paths[:3]:
        assert not known(path, directory)
        age()
    assert known(paths[0], directory)
    age()
    assert not known(paths[3], directory)
    assert len(list(directory.iterdir())) == 3
    assert known(paths[0], directory)
    assert known(paths[2], directory)
    (directory / "left by a killed writer").write_bytes(bytes(1000))
    os.utime(directory / "left by a killed writer", ns=(0, 0))
    entry_bytes = max(file.stat().st_size for file in directory.iterdir())
    monkeypatch.setattr(model_cache, "ENTRIES_BYTES_MAX", entry_bytes * 3 // 2)
    assert not known(paths[1], directory)
    assert len(list(directory.iterdir())) == 1
    monkeypatch.setattr(model_cache, "ENTRIES_BYTES_MAX", entry_bytes // 2)
    assert not known(paths[1], directory)
    assert not known(paths[2], directory)


def test_a_model_with_types_that_another_gguf_may_decode_is_not_kept(
    path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer `gguf` package may decode what this one cannot: that is found out each time."""
    with open_model_file(str(path)) as model_file:
        monkeypatch.setattr(next(iter(model_file.tensors.values())).type, "is_decoded", False)
        assert not known(path, directory)
        assert not known(path, directory)


def test_writers_and_readers_at_once(path: Path, directory: Path) -> None:
    """Any number that read and write the same entry at the same time find a whole one or none."""
    found: list[Sequence[int]] = []

    def work() -> None:
        for n in range(10):
            model_file, vocabulary = open_model(str(path), directory)
            with model_file:
                found.append(Tokenizer(vocabulary).encode(TEXT))
            if n % 3 == 0:
                for entry in directory.iterdir():
                    entry.unlink(missing_ok=True)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(tokens == found[0] for tokens in found)


def test_no_descriptor_is_left(path: Path, directory: Path) -> None:
    """Opening, whether from the entry or not, and with an entry that is not believed, leaves no descriptor."""
    known(path, directory)
    known(path, directory)
    (entry,) = directory.iterdir()
    spoil(entry, "100")
    known(path, directory)
    with pytest.raises(ModelError):
        open_model(str(path.with_name("missing")), directory)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # what threads of other tests close meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert not [link for link in links if str(path.parent) in link or str(directory) in link]


def test_gguf_is_not_imported_for_what_is_kept(path: Path, directory: Path) -> None:
    """A kept model needs no `gguf` package, which would take a tenth of a second to import."""
    known(path, directory)
    program = (
        "import sys; from pathlib import Path; from strata_client.model_cache import open_model\n"
        f"open_model({str(path)!r}, Path({str(directory)!r}))\n"
        "print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_refused_model_is_not_kept(tmp_path: Path, directory: Path) -> None:
    """A header without a vocabulary that can be used is refused each time, in the same words."""
    path = written(tmp_path / "bad.gguf", pre="unheard-of")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is unheard-of"):
            open_model(str(path), directory)
    assert not directory.exists()
