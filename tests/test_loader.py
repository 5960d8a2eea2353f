"""Names become models: conversion, vocabularies, damaged files, and what is refused before it costs time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers as tf
from conftest import sequence
from safetensors.torch import load_file, save_file
from test_hf import assert_close, build, plain, some_tokens

from flashspec import loader, pretrained, weights
from flashspec.core import EMPTY
from flashspec.errors import ModelError, OptionError, UnsupportedModelError, VocabularyError


def named(name: str, **vocabulary: int) -> loader.Loaded:
    return loader.Loaded(name, None, SimpleNamespace(get_vocab=lambda: vocabulary))


def test_vocabularies_must_mean_the_same() -> None:
    loader.check_vocabularies(named("big", a=0, b=1), named("small", b=1, a=0))
    with pytest.raises(VocabularyError, match=r"small has another vocabulary than big: 2 and 2 .* id 0"):
        loader.check_vocabularies(named("big", a=0, b=1), named("small", a=1, b=0))
    with pytest.raises(VocabularyError, match=r"2 and 3 tokens, .* id 2 \('c'\); use --drafter"):
        loader.check_vocabularies(named("big", a=0, b=1), named("small", a=0, b=1, c=2))


class Converter:
    """Stands in for ``weights._convert``, and writes down what it was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lines: list[str] = []
        self.before: Callable[[Path], None] = lambda folder: None

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.names.append(gguf.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(gguf.read_bytes())
        self.before(folder)

    def converted(self, gguf: Path, content: bytes | None = None) -> bytes:
        if content is not None:
            gguf.write_bytes(content)
        return (weights.converted(gguf, self.lines.append) / "config.json").read_bytes()


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Converter]:
    fake = Converter()
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_convert", fake)
    yield fake
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_file_is_converted_once_per_content(converter: Converter, tmp_path: Path) -> None:
    assert converter.converted(tmp_path / "a.gguf", b"one") == b"one"
    assert converter.converted(tmp_path / "a.gguf") == b"one"
    assert converter.converted(tmp_path / "b.gguf", b"one") == b"one"
    assert converter.converted(tmp_path / "c.gguf", b"two") == b"two"
    assert converter.names == ["a.gguf", "c.gguf"]
    assert [line for line in converter.lines if "reading" in line] == [f"reading {name}.gguf" for name in "abc"]
    (tmp_path / "a.gguf").write_bytes(b"six")
    os.utime(tmp_path / "a.gguf", ns=(1, 1))  # another time: no file is read again without a reason
    assert converter.converted(tmp_path / "a.gguf") == b"six"
    assert converter.names == ["a.gguf", "c.gguf", "a.gguf"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'"text"', b"3", None])
def test_a_corrupt_index_of_digests(converter: Converter, tmp_path: Path, content: bytes | None) -> None:
    converter.converted(tmp_path / "a.gguf", b"one")
    index = tmp_path / "cache" / "digests.json"
    known = json.loads(index.read_text())
    index.write_bytes(json.dumps(dict.fromkeys(known)).encode() if content is None else content)
    assert converter.converted(tmp_path / "a.gguf") == b"one"
    assert converter.names == ["a.gguf"]
    assert json.loads(index.read_text()) == known


def test_a_conversion_that_fails_can_be_repeated(converter: Converter, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise ModelError("cannot read it")

    converter.before = fail
    with pytest.raises(ModelError, match="cannot read it"):
        converter.converted(tmp_path / "a.gguf", b"one")
    converter.before = lambda folder: None
    assert converter.converted(tmp_path / "a.gguf") == b"one"


def test_another_process_may_be_first(converter: Converter, tmp_path: Path) -> None:
    def finish_elsewhere(folder: Path) -> None:
        shutil.copytree(folder, folder.with_name(folder.name.split(".")[0]))

    converter.before = finish_elsewhere
    assert converter.converted(tmp_path / "a.gguf", b"one") == b"one"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """The folder of a tiny model that loads."""
    folder = tmp_path_factory.mktemp("models") / "good"
    build("llama").save_pretrained(folder)
    for file in smollm2_path.glob("token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def test_a_good_folder_loads(good: Path) -> None:
    lines: list[str] = []
    loaded = loader.load_model(good, self_test=True, progress=lines.append)
    assert loaded.name == str(good)
    assert [line.split(" ")[0] for line in lines] == ["loading", "packing", "self-test"]
    score = loaded.target.score([sequence(some_tokens(9))], [EMPTY])[0]
    assert_close(score.logits[0], plain("llama", tuple(some_tokens(9)))[0])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-500])


def drop_a_tensor(file: Path) -> None:
    weights = load_file(file)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda file: file.write_bytes(b"garbage" * 100), "header too large"),
        ("model.safetensors", cut, "file not fully covered"),
        ("model.safetensors", Path.unlink, "no file named model.safetensors"),
        ("model.safetensors", drop_a_tensor, "model.layers.1.mlp.down_proj.weight"),
        ("config.json", lambda file: file.write_text("{"), "not a valid JSON file"),
        ("config.json", lambda file: file.write_text('{"model_type": "nosuch"}'), "nosuch"),
        ("tokenizer.json", Path.unlink, "tokenizer"),
    ],
    ids=["garbage", "cut", "no weights", "a tensor less", "half a config", "unknown type", "no tokenizer"],
)
def test_damaged_folders(copy: Path, name: str, damage: Callable[[Path], object], message: str) -> None:
    damage(copy / name)
    with pytest.raises(ModelError, match=f"cannot load .*{copy.name}.*: .*{message}"):
        loader.load_model(copy)


def test_an_unsupported_folder_is_refused_before_its_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    tf.MambaConfig().save_pretrained(copy)
    with pytest.raises(UnsupportedModelError, match="mamba has layers of type"):
        loader.load_model(copy)


@pytest.mark.usefixtures("converter")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", None, "there is no model '.*nothing' here"),
        ("nothing.gguf", None, "there is no file .*nothing.gguf"),
        ("weights.bin", b"x", "weights.bin is a file; give a folder with a Transformers model, or a .gguf file"),
    ],
)
def test_paths_without_a_model(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        loader.load_model(tmp_path / name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the folder .* has no config.json"):
        loader.load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"garbage" * 100])
def test_a_garbage_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*bad.gguf: .*; give a whole GGUF file"):
        loader.load_model(tmp_path / "bad.gguf")
    assert not list((tmp_path / "cache" / "models").glob("*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device is 'meta'; it must be"),
        ({"device": "cuda:99"}, "device is 'cuda:99', and this machine has"),
    ],
)
def test_wrong_device_and_dtype_names(good: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        loader.load_model(good, **options)


def test_layouts_are_tried_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path))
    answers = iter([True, False])
    monkeypatch.setattr("flashspec.backends.hf.packing_pays", lambda out, into: next(answers))
    assert [pretrained.packing_pays(8, 4), pretrained.packing_pays(8, 4), pretrained.packing_pays(4, 8)] == [1, 1, 0]
    assert pretrained.packing_pays(4, 8) is False
    (file,) = (tmp_path / "costs").glob("layouts-*.json")
    file.write_text("junk", encoding="utf-8")
    answers = iter([False])
    assert pretrained.packing_pays(8, 4) is False
