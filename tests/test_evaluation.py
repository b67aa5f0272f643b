"""Evaluation does not disturb training, nor does it depend on the batch size, the number of ranks or the compiler."""

import functools
import math

import hellaswag
import numpy as np
import pytest
import tokenizer
import torch
import train_gpt2
from plumbing.checkpoint import load_checkpoint, load_model_state, resize
from plumbing.distributed import World
from plumbing.huggingface import export_huggingface
from torch.nn import functional as F
from train_gpt2 import IGNORE_INDEX

from harness import examples_file, losses, make_shards, read_log, succeed, tiny_flags, tiny_model, train, windows


@pytest.mark.parametrize("masks", [False, True], ids=["all targets", "masked targets"])
@pytest.mark.parametrize("batch_size", [5, 64])
def test_validation_does_not_depend_on_the_batch_size_or_on_train_shards(masks, batch_size, tmp_path):
    """37 windows, which no B here divides, of the validation split, compared with one batch of 37 rows."""
    start = tmp_path / "start"
    export_huggingface(tiny_model(vocab_size=257), tokenizer.get_encoding("bytes"), start)
    more = make_shards(tmp_path / "more", lengths=(2000, 3000, 1700, 900), masks=masks)
    (path,) = more.glob("*_val_*.npy")
    tokens = np.load(path)
    tokens[100:600:10] = 256  # more documents
    np.save(path, tokens)
    options = dict(init_from=start, batch_size=batch_size, total_batch_size=16 * batch_size)
    options |= dict(val_tokens=37 * 16, val_every=1)
    assert train(more, tmp_path / "out", **options | {"max_steps": 1}) == 0
    shape, weights, _ = load_model_state(start)
    model = train_gpt2.GPT.from_state(*resize(shape, weights, block_size=32, vocab_size=320))
    x, y = windows(more, "val", 16, masks)
    with torch.no_grad():
        expected = F.cross_entropy(model(x[:37])[0].flatten(0, 1), y[:37].flatten(), ignore_index=IGNORE_INDEX).item()
    assert losses(tmp_path / "out", "val")[0] == pytest.approx(expected, abs=1e-5)
    targets = y[:37][y[:37] != IGNORE_INDEX]
    num_bytes = (targets < 256).sum().item()  # a byte each, <|endoftext|> none
    bits_per_byte = expected * len(targets) / math.log(2) / num_bytes
    assert num_bytes < len(targets)
    assert losses(tmp_path / "out", "val_bpb")[0] == pytest.approx(bits_per_byte, rel=1e-5)


def test_evaluation_leaves_the_training_losses_bit_for_bit_alone(data, tmp_path):
    hellaswag_data = examples_file(tmp_path, [f"A man is on roof {n}. he" for n in range(6)])
    off = dict(val_every=0, sample_every=0, hellaswag_every=0, checkpoint_every=0)
    on = dict(val_every=1, sample_every=2, hellaswag_every=2, hellaswag_data=hellaswag_data, checkpoint_every=3)
    assert train(data, tmp_path / "off", **off) == 0
    assert train(data, tmp_path / "on", **on) == 0
    assert read_log(tmp_path / "off") == read_log(tmp_path / "on")
    assert sorted(read_log(tmp_path / "on", "hella")) == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(read_log(tmp_path / "on", "val")) == list(range(13))  # the last update is evaluated too
    assert sorted(read_log(tmp_path / "off", "val")) == []


def test_hellaswags_score_is_acc_norm_over_all_ranks(data, tmp_path):
    """12 examples on 2 ranks score as on one, and as acc_norm of the exported model; acc is another number here."""
    labels = [0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 1, 3]  # whichever ending a rule prefers, its count is its own
    hellaswag_data = examples_file(tmp_path, ["ab " * n + "c" for n in range(1, 13)], labels)
    options = dict(hellaswag_every=6, hellaswag_data=hellaswag_data, max_steps=6, val_every=0, checkpoint_every=0)
    assert train(data, tmp_path / "one", **options) == 0
    args = tiny_flags(data, tmp_path / "two", **options)
    succeed(train_gpt2.main, args, output=tmp_path / "output", ranks=2)
    model, enc = train_gpt2.load_model(str(tmp_path / "one"))
    examples = hellaswag.load_examples(hellaswag_data, enc)
    total, mean, _ = hellaswag.score(model, examples, enc.n_vocab)
    acc, acc_norm = ((values.argmax(1) == labels).mean() for values in (total, mean))
    shares = [(mean.argmax(1) == labels)[rank::2].mean() for rank in (0, 1)]
    assert acc_norm not in (acc, *shares), "or this test could not tell them apart"
    for folder in ("one", "two"):
        assert float(read_log(tmp_path / folder, "hella")[6]) == pytest.approx(acc_norm)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_compiles_nothing_anew(data, tmp_path, capsys, monkeypatch, backend):
    """With validation, HellaSwag and samples on; a recompilation is an error. inductor takes half a minute more."""
    import torch._dynamo

    hellaswag_data = examples_file(tmp_path, ["ab " * n for n in (1, 3, 7)])
    options = dict(val_every=4, sample_every=4, hellaswag_every=4, hellaswag_data=hellaswag_data)
    assert train(data, tmp_path / "plain", **options) == 0
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert train(data, tmp_path / "compiled", compile=True, **options) == 0
    assert graphs["unique_graphs"] == 1, "one for training and validation"
    assert "without torch.compile" not in capsys.readouterr().out
    assert np.allclose(losses(tmp_path / "plain"), losses(tmp_path / "compiled"), atol=1e-4)
    assert np.allclose(losses(tmp_path / "plain", "val"), losses(tmp_path / "compiled", "val"), atol=1e-4)
    names = load_checkpoint(tmp_path / "compiled" / "model_00012.pt")["model"]
    assert not any("_orig_mod" in name or "module." in name for name in names)


def test_samples_of_a_chat_model_are_answers_with_role_markers(monkeypatch):
    enc, seen = tokenizer.get_encoding("bytes+chat"), []

    def generate(self, idx, *args, **options):
        seen.append(idx)
        return (torch.tensor([token] * 4) for token in [*b"Yes", enc.encode_single_token("<|end|>"), *b"rest"])

    monkeypatch.setattr(train_gpt2.GPT, "generate", generate)
    config = train_gpt2.TrainConfig(sample_prompt="Hi")
    texts = train_gpt2.generate_samples(tiny_model(), enc, config, world=World())
    assert texts == ["<|user|>Hi<|end|><|assistant|>Yes"] * 4
    # 256 bytes, <|endoftext|>, <|user|>, <|assistant|>, <|system|>, <|end|>
    assert seen[0].tolist() == [[256, 257, *b"Hi", 260, 258]] * 4
