"""bench.py on tiny shapes: the sides do the same work, the numbers are what they are called, mistakes are said."""

import json

import numpy as np
import pytest
import torch
from conftest import flags, status_of, tiny_model

import bench
import bench_gpu
import hellaswag
import tokenizer
import train_gpt2

TINY = dict(
    n_layer=1,
    n_head=2,
    n_embd=32,
    vocab_size=320,
    batch_size=2,
    sequence_length=16,
    total_batch_size=64,
    rounds=2,
    device="cpu",
    dtype="float32",
)
KEYS = {"ratio", "ratios", "seconds", "peak_gib", "device", "versions", "commit", "command", "options"}
# a nanoGPT checkout as far as bench.py knows one, on top of our own model
PEER = """
import torch, train_gpt2
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        assert c.dropout == 0.0 and c.bias
        self.gpt = train_gpt2.GPT(train_gpt2.GPTConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd))

    def forward(self, idx, targets):
        return self.gpt(idx, targets)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


def measure(tmp_path, what, **options):
    """The numbers that `bench.py what --json` writes."""
    file = tmp_path / "numbers.json"
    assert status_of(bench.main, [what, *flags(json=file, **options)]) == 0
    numbers = json.loads(file.read_text())
    assert KEYS <= set(numbers), "what --json promises"
    return numbers


def test_train_is_compared_with_transformers_and_a_peer(tmp_path, capsys):
    (tmp_path / "model.py").write_text(PEER)
    numbers = measure(tmp_path, "train", peer=tmp_path, steps=1, variants="batch_size=4", **TINY)
    names = ["train_gpt2", "transformers", "transformers, fused AdamW", "nanoGPT", "train_gpt2 batch_size=4"]
    assert list(numbers["seconds"]) == names and list(numbers["ratios"]) == names[1:]
    assert numbers["tok_per_s"] == pytest.approx(64 / np.median(numbers["seconds"]["train_gpt2"]))
    theirs, ours = numbers["seconds"]["transformers"], numbers["seconds"]["train_gpt2"]
    assert numbers["ratio"] == pytest.approx(np.median(np.divide(theirs, ours)))
    # every side learned something of the same kind: losses of random ids
    assert all(loss == pytest.approx(np.log(320), abs=0.5) for loss in numbers["losses"].values())
    assert numbers["losses"]["train_gpt2 batch_size=4"] == pytest.approx(numbers["losses"]["train_gpt2"], abs=1e-5)
    families = numbers["families"]
    assert all(families[name] > 0 for name in ("matmul", "attention", "loss", "optimizer", "GELU", "other"))
    lines = capsys.readouterr().out.splitlines()
    table = lines[-6:]
    # the columns line up: each row has its numbers where the others have theirs
    assert len({line.index(".", 24) for line in table[1:]}) == 1


def test_the_references_of_train_do_our_training(tmp_path):
    """transformers with our weights, on our batch: the loss and the weights after a step are ours, too."""
    options = bench.cli.parse(bench.Options, ["train", *flags(**TINY)])
    config = bench.train_config(options, "cpu")
    place = bench.choose_place(config, "cpu")
    bench.random_shards(tmp_path, config)
    theirs = bench.make_transformers(config, tmp_path, place, 1)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(config.block_size, 320, 1, 2, 32))
    weights = dict(theirs.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[name]
            parameter.copy_(weight.T if name.endswith(bench.MATRICES) else weight)
    optimizers = train_gpt2.configure_optimizers(model, config)
    idx = theirs.tokens[:64].view(2, 2, 16)  # two micro-steps of two sequences
    # transformers leaves out the last target of each sequence, for it has none
    targets = torch.cat([idx[:, :, 1:], torch.full((2, 2, 1), train_gpt2.IGNORE_INDEX)], 2)
    loss = sum(model(x, y)[1] / 2 for x, y in zip(idx, targets))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    train_gpt2.apply_schedules(optimizers, 0, config)
    optimizers[0].step()
    assert theirs() == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        weight = weights[name].T if name.endswith(bench.MATRICES) else weights[name]
        assert torch.allclose(parameter, weight, atol=1e-5), name


def test_hellaswag_in_four_rows_chooses_what_packed_rows_choose(tmp_path):
    examples = bench_gpu.synthetic_examples(12)
    model = tiny_model(block_size=256).eval()
    assert np.array_equal(bench.four_rows(model, examples, 257), hellaswag.predict(model, examples, 257)[:, :2])
    example = {"activity_label": "a", "endings": ["goes.", "stays on.", "sits.", "is"], "label": 1}
    lines = [example | {"ctx": f"A man {i}."} for i in range(5)]
    (tmp_path / "h.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = dict(n_layer=1, n_head=2, n_embd=32, tokenizer="bytes", device="cpu")
    numbers = measure(tmp_path, "hellaswag", data=tmp_path / "h.jsonl", rounds=1, **shape)
    assert numbers["examples"] == numbers["same_by_sum"] == numbers["same_by_mean"] == 5
    assert numbers["examples_per_s"] > 0


def test_sample_gives_the_same_tokens_on_every_side(tmp_path):
    shape = dict(n_layer=1, n_head=2, n_embd=32, tokenizer="bytes", device="cpu")
    numbers = measure(tmp_path, "sample", max_new_tokens=12, batch_size=2, rounds=1, **shape)
    assert numbers["same_tokens"] == {"sample.py": True, "without a cache": True, "transformers": True}
    assert set(numbers["ratios"]) == {"without a cache", "transformers"} and numbers["tok_per_s"] > 0


def test_data_counts_the_tokens_that_tiktoken_counts(tmp_path, capsys):
    texts = [[f"Document {i} {j}. " * 50 for j in range(20)] for i in range(2)]
    for i, part in enumerate(texts):
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    numbers = measure(tmp_path, "data", input=tmp_path / "*.jsonl", tokenizer="bytes", rounds=1, device="cpu")
    enc = tokenizer.get_encoding("bytes")
    assert numbers["tokens"] == sum(len(enc.encode_ordinary(text)) + 1 for part in texts for text in part)
    assert numbers["tok_per_s"] > 0 and "disagree" not in capsys.readouterr().out


def test_the_ladder_adds_one_optimization_at_a_time(tmp_path, monkeypatch, capsys):
    compiled = []

    class Compiled(torch.nn.Module):
        def __init__(self, model, **options):
            super().__init__()
            self.model = model
            compiled.append(model)

        def forward(self, *args, **options):
            return self.model(*args, **options)

    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(bench, "make_rungs", lambda device, make=bench.make_rungs: make("cuda"))  # all of them
    picture = tmp_path / "ladder.png"
    shape = dict(n_layer=1, n_head=2, n_embd=32, batch_size=1, sequence_length=16, rounds=1, device="cpu")
    numbers = measure(tmp_path, "ladder", plot=picture, **shape)
    names = [
        "float32",
        "TF32",
        "bfloat16 autocast",
        "torch.compile",
        "flash attention",
        "vocabulary 50304",
        "fused AdamW",
        "this program",
    ]
    assert list(numbers["rungs"]) == names and len(compiled) == 5
    for name, rung in numbers["rungs"].items():
        # weights and data are the same in all rungs but for the vocabulary's size, and the program's own are shuffled
        assert rung["loss"] == pytest.approx(np.log(50257), abs=0.2), name
    rungs = list(numbers["rungs"].values())
    assert rungs[2]["loss"] == pytest.approx(rungs[4]["loss"], abs=2e-3), "flash attention is the same attention"
    assert rungs[0]["total"] == 1 and numbers["ratio"] == rungs[-1]["total"]
    assert rungs[-1]["tok_per_s"] == numbers["tok_per_s"] == pytest.approx(1e3 * 16 / rungs[-1]["ms"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[-8:]] == names


def test_a_rung_that_the_processor_lacks_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    names = [rung.name for rung in bench.make_rungs("cpu")]
    assert names == ["float32", "torch.compile", "flash attention", "vocabulary 50304", "fused AdamW"]
    assert bench.make_rungs("cpu")[-1] == bench.Rung("fused AdamW", False, "float32", True, True, 50304, True)


def test_kernels_belong_to_the_families_that_their_names_say():
    kernels = {
        "triton_red_fused__log_softmax__to_copy__unsafe_view_prepare_softmax_online_view_10": "loss",
        "triton_per_fused__to_copy_add_native_layer_norm_view_5": "LayerNorm, residual",
        "triton_per_fused_add_embedding_dense_backward_native_layer_norm_backward_15": "LayerNorm, residual",
        "triton_red_fused_gelu_gelu_backward_sum_view_6": "bias gradients",
        "triton_red_fused_cat_sum_transpose_view_11": "bias gradients",
        "triton_red_fused_sum_view_2": "bias gradients",
        "triton_poi_fused_gelu_gelu_backward_view_5": "GELU",
        "triton_poi_fused_cat_transpose_view_10": "q, k, v gradients",
        "triton_poi_fused__to_copy_t_9": "copies",
        "triton_poi_fused_embedding_dense_backward_14": "embedding",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "cross_entropy_kernel": "loss",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "aten::native_layer_norm_backward": "LayerNorm, residual",
        "aten::gelu_backward": "GELU",
        "aten::add_": "other",
    }
    assert {name: bench.family_of(name) for name in kernels} == kernels


def test_mistakes_are_one_line(tmp_path, capsys):
    mistakes = {
        "There is no model.py in": ["train", "--peer", str(tmp_path)],
        "quickstart": ["train", "--preset", "quickstar"],
        "--rounds": ["train", "--round", "3"],
        "--max-new-tokens is 0, but it must be 1 or more.": ["sample", "--max-new-tokens", "0"],
        "--rounds is -1, but it must be 0 or more.": ["train", "--rounds", "-1"],
        "--n-embd is -4": ["sample", "--n-embd", "-4"],
        "no-such.jsonl": ["hellaswag", "--data", str(tmp_path / "no-such.jsonl"), *flags(n_layer=1, tokenizer="bytes")],
        "tpu": ["train", "--device", "tpu"],
    }
    for part, args in mistakes.items():
        assert status_of(bench.main, args) == 2, part
        said = capsys.readouterr().err
        assert said.startswith("error: ") and part in said and said.count("\n") == 1, said
