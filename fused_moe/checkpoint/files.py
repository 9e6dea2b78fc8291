"""Folders of safetensors: `open_folder` reads one lazily, `write_shards` writes one.

Tensors that are read are views of mapped files: a part of one, an expert say, is read alone, and when it is
used.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_SHARD_SIZE = "5GB"
_FN = "fused_moe.checkpoint"


def safetensors():
    """The package, of the extra `checkpoint`."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{_FN} reads and writes safetensors: pip install safetensors") from error
    return safetensors


# --- reading ----------------------------------------------------------------------------------------------


def open_folder(path: str | os.PathLike) -> Folder:
    """Opens a checkpoint's tensors by their names; each is read when it is asked for.

    Args:
        path: a folder with model.safetensors, or with model.safetensors.index.json and its shards; or one
            file of safetensors.

    Returns:
        A mapping of names to tensors.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: there are no such files, a shard is missing or cannot be read, or the index and the shards
            contradict each other. The message names file and key.

    Example:
        >>> import tempfile
        >>> from fused_moe import checkpoint
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"a": torch.zeros(2)}, f"{folder}/model.safetensors")
        ...     list(checkpoint.open_folder(folder))
        ['a']
    """
    return Folder(Path(path))


class Folder(Mapping[str, Tensor]):
    """What `open_folder` returns."""

    def __init__(self, path: Path):
        self.path = path
        index = path / INDEX
        if path.is_file():
            self._open_one(path)
        elif (path / ONE).is_file():
            self._open_one(path / ONE)
        elif index.is_file():
            self._open_shards(index)
        else:
            expected = f"{ONE} or {INDEX} in {path}"
            names = sorted(os.listdir(path)) if path.is_dir() else ["no such folder"]
            found = ", ".join(names[:8]) or "nothing"
            if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
                found += (
                    "; pickled weights are not read, transformers' save_pretrained makes safetensors of them"
                )
            raise ValueError(f"{_FN}: expected {expected}, found {found}")

    def _open_one(self, path: Path) -> None:
        shard = _open(path)
        self._shards = dict.fromkeys(shard.keys(), shard)
        self._files = dict.fromkeys(self._shards, path)

    def _open_shards(self, index: Path) -> None:
        try:
            names = json.loads(index.read_text())["weight_map"]
            paths = {file: index.parent / Path(file).name for file in names.values()}
            files = {name: paths[file] for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{_FN}: expected {index} with a "weight_map" of names to files') from error
        self._files, self._shards = files, {}
        for path in dict.fromkeys(files.values()):
            if not path.is_file():
                keys = [name for name, file in files.items() if file == path]
                raise ValueError(
                    f"{_FN}: expected {path}, which {index.name} names for {keys[0]}, found none"
                )
            shard = _open(path)
            for name in shard.keys():
                if name not in files:
                    raise ValueError(f"{_FN}: expected {name}, a key of {path}, in {index.name}, found none")
                if files[name] != path:
                    expected = f"{name} in {files[name].name} alone, as {index.name} says"
                    raise ValueError(f"{_FN}: expected {expected}, found one in {path}, too")
                self._shards[name] = shard
        for name, path in files.items():
            if name not in self._shards:
                raise ValueError(f"{_FN}: expected {name} in {path}, as {index.name} says, found none")

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def nbytes(self) -> int:
        """The bytes of all files that the tensors are in."""
        return sum(path.stat().st_size for path in set(self._files.values()))

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __repr__(self) -> str:
        return f"open_folder({str(self.path)!r})"


def _open(path: Path):
    """A file of safetensors, of which nothing but its header is read."""
    package = safetensors()
    try:
        return package.safe_open(path, "pt")
    except package.SafetensorError as error:
        raise ValueError(
            f"{_FN}: expected {path} to be a whole file of safetensors, found {error}"
        ) from error


@contextmanager
def naming_files(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, an error that names a key also says in which file that is."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(tensors, Folder):
            raise
        keys = [word for word in re.split(r"[\s,]+", str(error)) if word in tensors]
        where = tensors.file_of(keys[0]) if keys else tensors.path
        if str(where) in str(error):
            raise
        raise type(error)(f"{error}, in {where}") from error


# --- writing ----------------------------------------------------------------------------------------------


@contextmanager
def new_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A folder that gets the name `out` at the end, and that nothing is left of after an error."""
    out = Path(os.path.abspath(out))
    check_new(out)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        folder = Path(beside) / out.name
        folder.mkdir()
        yield folder
        check_new(out)
        folder.rename(out)


def check_new(out: str | os.PathLike) -> None:
    """Checks that nothing would be written over."""
    out = Path(os.path.abspath(out))
    if out.exists() or out.is_symlink():
        raise ValueError(f"{_FN}: expected no {out}, since nothing is written over, found one")
    if not out.parent.is_dir():
        raise ValueError(f"{_FN}: expected the folder {out.parent} for {out.name}, found none")


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Writes tensors as they come, into model.safetensors, or several shards and their index. Only those of
    one shard are held. A tensor that is larger than max_shard_size has a shard to itself."""
    most, save = size_of(max_shard_size), safetensors().torch.save_file
    shards: list[list[str]] = []
    names: set[str] = set()
    held: dict[str, Tensor] = {}
    held_bytes = total = 0

    def flush() -> None:
        nonlocal held_bytes
        try:
            save(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        except safetensors().SafetensorError as error:
            raise OSError(f"{_FN}: {folder}: {error}") from error
        shards.append([*held])
        held.clear()
        held_bytes = 0

    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"{_FN}: expected one tensor {name}, found two")
        if held and held_bytes + tensor.nbytes > most:
            flush()
        names.add(name)
        held[name] = tensor.detach().cpu().contiguous()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    if held or not shards:
        flush()
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / ONE)
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"{i}.safetensors").rename(folder / file)
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    write_json(
        folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    )


def write_json(path: Path, value) -> None:
    """As transformers does."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def size_of(size: int | str) -> int:
    """Bytes of a size, "5GB" say."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]I?B)?", str(size).upper())
    if isinstance(size, bool) or match is None or not float(match[1]):
        raise ValueError(f'{_FN}: expected max_shard_size in bytes or as "5GB" or "500MB", found {size!r}')
    return int(float(match[1]) * UNITS[match[2] or ""])
