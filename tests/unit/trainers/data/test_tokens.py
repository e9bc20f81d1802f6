"""Tokenised files: made from text and JSON lines, in two layouts, and read by windows."""

from __future__ import annotations

import json
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from hpcjobs import trainers
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data import tokenize
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.lm import TokensInfo, map_tokens, token_windows

TEXTS = ["Die Jägerin läuft.", "नमस्ते दुनिया", "one and one is two", "two and two is four"] * 5


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)), "utf-8")
    return path


def make(folder: Path, *flags: str) -> int:
    return tokenize.main(["--out", str(folder), *flags])


@pytest.mark.parametrize("layout", ["nanogpt", "megatron"])
def test_each_document_is_in_the_files_once_with_an_end_of_text_behind_it(
    layout: str, lines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tokens"
    assert make(out, "--layout", layout, "--held-out-every", "10", "--shard-tokens", "150", str(lines)) == 0
    train = sorted(out.glob("train-*.bin"))
    assert len(train) > 1
    parts = [map_tokens(path).tolist() for path in (*train, out / "val-00000.bin")]
    documents = [bytes(part).decode() for part in _split(list(chain.from_iterable(parts)), 256)]
    assert sorted(documents) == sorted(TEXTS)
    assert _split(map_tokens(out / "val-00000.bin").tolist(), 256) == [list(TEXTS[n].encode()) for n in (9, 19)]
    info = TokensInfo.read(out)
    assert info is not None
    assert (info.vocabulary, info.end_of_text, info.documents) == (257, 256, 20)
    assert info.train_tokens + info.held_out_tokens == sum(len(text.encode()) + 1 for text in TEXTS)


def _split(tokens: list[int], end: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end:
            documents[-1].pop()
            documents.append([])
    return documents[:-1]


def test_the_index_is_megatrons(lines: Path, tmp_path: Path) -> None:
    """Read as Megatron-LM's IndexedDataset does."""
    out = tmp_path / "tokens"
    assert make(out, "--layout", "megatron", str(lines)) == 0
    index = (out / "train-00000.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack("<QBQQ", index[9:34])
    assert (version, code, sequences, documents) == (1, 8, 20, 21)
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    boundaries = np.frombuffer(index, np.int64, documents, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * documents
    assert boundaries.tolist() == list(range(21))
    data = np.memmap(out / "train-00000.bin", dtype=np.uint16, mode="r")
    third = data[pointers[2] // 2 : pointers[2] // 2 + lengths[2]]
    assert bytes(third[:-1].tolist()).decode() == TEXTS[2]


def test_a_tokenizer_file_of_hugging_face_makes_the_tokens_and_lies_beside_them(lines: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(tmp_path / "mine.json"))
    out = tmp_path / "tokens"
    assert make(out, "--tokenizer", str(tmp_path / "mine.json"), str(lines)) == 0
    info = TokensInfo.read(out)
    assert info is not None
    assert (info.vocabulary, info.end_of_text) == (tokenizer.get_vocab_size(), 0)
    first = _split(map_tokens(out / "train-00000.bin").tolist(), 0)[0]
    assert tokenizer.decode(first) == TEXTS[0]
    assert len(first) < len(TEXTS[0].encode())
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_a_decoder_trains_on_them_with_their_vocabulary(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    assert make(out, "--held-out-every", "5", str(lines)) == 0
    workload = load_workload(Config(workload="lm", tokens=(str(out),), sequence_length=16))
    inputs, targets = workload.train.read_batch([0, 1])
    flat = map_tokens(out / "train-00000.bin")
    assert inputs.tolist() == [flat[:16].tolist(), flat[16:32].tolist()]
    assert targets.tolist() == [flat[1:17].tolist(), flat[17:33].tolist()]
    assert workload.build_model().get_submodule("token").weight.shape[0] == 320  # 257, to a multiple of 64
    flags = ["--workload", "lm", "--tokens", str(out), "--sequence-length", "16", "--steps", "3", "--batch-size", "2"]
    assert trainers.run("ddp", [*flags, "--run-dir", str(tmp_path)]) == 0


def test_files_of_nanogpt_itself_need_a_vocabulary_and_hold_out_their_end(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    flags = ["--workload", "lm", "--tokens", str(tmp_path), "--sequence-length", "10", "--run-dir", str(tmp_path)]
    assert trainers.run("ddp", flags) == 2
    train, held_out = token_windows([str(tmp_path / "train.bin")], length=10)
    assert (len(train), len(held_out)) == (95, 4)
    assert held_out.read_batch([3])[1][0, -1] == 990


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("splits", [(), ("train", "validation")])
def test_rows_of_a_saved_dataset_are_documents(
    splits: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"number": list(range(len(TEXTS))), "body": TEXTS}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name in splits})
    (saved if splits else datasets.Dataset.from_dict(rows)).save_to_disk(str(tmp_path / "saved"))
    out = tmp_path / "tokens"
    assert make(out, str(tmp_path / "saved")) == 15
    assert "saved has no text in 'text'; it has number, body. Hint: --text-field NAME" in capfd.readouterr().err
    assert make(out, "--text-field", "body", "--held-out-every", "1000", str(tmp_path / "saved")) == 0
    documents = [bytes(part).decode() for part in _split(map_tokens(out / "train-00000.bin").tolist(), 256)]
    assert documents == TEXTS * max(1, len(splits))


@pytest.mark.parametrize("layout", ["nanogpt", "megatron"])
def test_a_vocabulary_is_counted_up_to_its_highest_number_although_others_are_missing(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens with the numbers 1 and 70,000: 16 bits would make 4,464 of the latter."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"one": 1, "two": 70_000}, unk_token="one")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one two one")
    code = make(
        tmp_path / "out", "--tokenizer", str(tmp_path / "tokenizer.json"), "--layout", layout, str(tmp_path / "a.txt")
    )
    if layout == "nanogpt":
        assert code == 2
        assert "the vocabulary has 70,001 tokens" in capsys.readouterr().err
    else:
        assert code == 0
        assert map_tokens(tmp_path / "out" / "train-00000.bin").tolist() == [1, 70_000, 1]
        info = TokensInfo.read(tmp_path / "out")
        assert info is not None
        assert info.vocabulary == 70_001


@pytest.mark.parametrize(
    ("name", "content", "flags", "code", "arguments"),
    [
        ("a.jsonl", '{"body": "x"}\n', (), 15, "a.jsonl:1 has no text in 'text'; it has body"),
        ("a.jsonl", "{'text'}\n", (), 15, "a.jsonl:1 is not JSON"),
        ("a.txt", "x", ("--tokenizer", "nowhere.json"), 14, "--tokenizer nowhere.json: no such file"),
        ("a.txt", "x", ("--out", "."), 2, "--out . is there already"),
        ("a.txt", "x", ("--held-out-every", "1"), 15, "have no tokens to train on"),
        ("a.txt", "\udcff", (), 15, "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_tokenised_is_named_and_leaves_nothing(
    name: str, content: str, flags: tuple[str, ...], code: int, arguments: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert tokenize.main(["--out", str(tmp_path / "tokens"), *flags, str(path)]) == code
    message = capsys.readouterr().err
    assert arguments in message
    assert message.count("\n") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name not in ("here", "home")) == [name]


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        ({"train.bin": b"123"}, "has 3 bytes, which are not tokens of 2 bytes"),
        ({"train.bin": b"1234", "train.idx": b"other"}, "is not the index of a Megatron data set"),
        ({"train.bin": bytes(20)}, "has 10 tokens; two windows of 16 are the least"),
        ({"val.bin": bytes(20)}, "all files are held out by their names"),
        ({}, "the folder has no .bin file"),
    ],
)
def test_files_that_are_no_tokens_are_refused_by_name(files: dict[str, bytes], arguments: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Exception, match=arguments):
        token_windows([str(tmp_path)], length=16)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU the model itself would end with an assertion of the device, which says nothing of data."""
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    flags = ["--workload", "lm", "--tokens", str(tmp_path / "train.bin"), "--vocabulary", "64", "--steps", "2"]
    assert trainers.run("ddp", [*flags, "--sequence-length", "10", "--run-dir", str(tmp_path), "--no-probe"]) == 15
    message = capsys.readouterr().err
    assert "and the model has 64 tokens, numbered from 0. Hint: --vocabulary N" in message
    assert message.count("\n") == 1
