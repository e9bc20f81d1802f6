"""Low-rank adapters: what is trained and saved, on the bundled decoder and on models of transformers from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcjobs import trainers
from hpcjobs.runtime import checkpoints
from hpcjobs.trainers import checkpoint
from hpcjobs.trainers.checkpoint import export
from hpcjobs.trainers.data import tokenize
from hpcjobs.trainers.weights import read_weights

from ..conftest import Runs
from ..fsdp_here import runnable

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SENTENCES = ("one and one is two", "two and two is four", "four and one is five", "two and one is three")
COMMON = ("--sequence-length", "8", "--steps", "8", "--log-every", "1", "--no-probe", "--lr", "0.01")
LORA = ("--lora", "4", "--checkpoint-every", "8")
STRATEGIES = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer of its own, as `save_pretrained` writes them."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    arguments = sorted({token for sentence in SENTENCES for token in sentence.split()})
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {token: n for n, token in enumerate(["</s>", "<unk>", *arguments])}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(7)
    shape = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    lines = [json.dumps({"text": SENTENCES[n % 4]}) for n in range(400)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    arguments = [
        "--tokenizer",
        str(model / "tokenizer.json"),
        "--out",
        str(folder / "made"),
        str(folder / "corpus.jsonl"),
    ]
    assert tokenize.main(arguments) == 0
    return folder / "made"


def read_saved(run_dir: Path) -> dict[str, Any]:
    place = next(place for place, wrong in checkpoints.newest_valid(run_dir / "checkpoints") if wrong is None)
    return checkpoint.read(place)[1]


def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.arange(16).view(2, 8)).logits
    return logits


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft reads
def test_a_model_of_transformers_learns_by_its_adapters_alone_and_merges_to_the_same_logits(
    model: Path, tokens: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    runs, names = Runs(tmp_path, 2), runnable(STRATEGIES)
    flags = ("--workload", "lm", "--model", str(model), "--tokens", str(tokens), "--batch-size", "4", *COMMON, *LORA)
    runs.run(*((name, name, flags) for name in names))
    losses = runs["ddp"].losses()
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.3  # type: ignore[operator]
    for name in names:
        assert runs[name].losses() == pytest.approx(losses, rel=2e-4), name
        saved = read_saved(runs[name].run_dir)
        assert all("lora_" in tensor for tensor in saved["model"]), name
        assert len(saved["model"]) == 2 * 2 * 7, "two matrices beside each linear layer of both blocks"
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before

    for name in runnable(("ddp", "fsdp")):
        adapters, merged = tmp_path / f"{name}-adapters", tmp_path / f"{name}.safetensors"
        assert export.main([str(runs[name].run_dir), "--out", str(adapters)]) == 0
        assert export.main([str(runs[name].run_dir), "--merge", "--out", str(merged)]) == 0
        adapted = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(model), str(adapters))
        complete = transformers.LlamaForCausalLM.from_pretrained(model)
        plain = compute_logits(complete)
        complete.load_state_dict(read_weights(merged), strict=False)
        assert torch.allclose(compute_logits(complete), compute_logits(adapted), atol=1e-5)
        assert not torch.allclose(compute_logits(complete), plain, atol=1e-2)
        base, changed = read_weights(model), read_weights(merged)
        assert {key for key in base if not torch.equal(base[key], changed[key])} == {
            key for key in base if "_proj" in key
        }


def test_an_interrupted_run_goes_on_from_its_adapters_with_the_same_losses(
    model: Path, tokens: Path, tmp_path: Path
) -> None:
    flags = ["--workload", "lm", "--model", str(model), "--tokens", str(tokens), "--batch-size", "4", *COMMON]
    saving = ["--lora", "4", "--checkpoint-every", "4"]
    runs = Runs(tmp_path, 1)
    stopped = [*flags, *saving]
    stopped[stopped.index("--steps") + 1] = "4"
    for name in runnable(("ddp", "fsdp")):
        runs.run((name, name, (*flags, *LORA)))
        runs.run((f"{name} again", name, tuple(stopped)))
        runs.run((f"{name} again", "ddp", (*flags, *saving)))
        assert runs[f"{name} again"].summary.resumed_from_step == 4
        assert runs[f"{name} again"].losses() == pytest.approx(runs[name].losses(), rel=2e-4)


def test_the_bundled_decoder_is_adapted_from_exported_weights(tmp_path: Path) -> None:
    lm = ["--workload", "lm", "--sequence-length", "8", "--train-samples", "256", "--no-probe", "--log-every", "1"]
    first, second, weights = tmp_path / "first", tmp_path / "second", tmp_path / "model.safetensors"
    assert trainers.run("ddp", [*lm, "--steps", "4", "--checkpoint-every", "4", "--run-dir", str(first)]) == 0
    assert export.main([str(first), "--out", str(weights)]) == 0
    adapt = ["--init-from", str(weights), "--lora", "2", "--lora-targets", "qkv", "--lr", "0.1"]
    flags = [*lm, *adapt, "--steps", "4", "--checkpoint-every", "4", "--run-dir", str(second)]
    assert trainers.run("ddp", flags) == 0
    assert export.main([str(second), "--merge", "--out", str(tmp_path / "merged.safetensors")]) == 0
    base, merged = read_weights(weights), read_weights(tmp_path / "merged.safetensors")
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {
        f"blocks.{n}.attention.qkv.weight" for n in range(2)
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", "2"], "--lora adapts weights that were trained before"),
        (["--model", "here", "--tokens", "there"], "--model here has no config.json"),
    ],
)
def test_what_is_missing_is_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_dir = tmp_path / "there"
    tokens_dir.mkdir()
    import numpy as np

    (tokens_dir / "train.bin").write_bytes(np.zeros(4000, np.uint16).tobytes())
    monkeypatch.chdir(tmp_path)
    assert trainers.run("ddp", ["--workload", "lm", "--vocabulary", "8", *flags, "--run-dir", str(tmp_path)]) in (2, 14)
    assert message in capsys.readouterr().err
