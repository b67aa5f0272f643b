"""The model compared with transformers' GPT-2, a loop and numbers worked by hand."""

import dataclasses

import pytest
import tokenizer
import torch
from plumbing.checkpoint import resize
from plumbing.huggingface import export_huggingface
from train_gpt2 import GPT, IGNORE_INDEX

from harness import tiny_model


def test_logits_loss_and_gradients_equal_transformers(tmp_path):
    """On random weights, saved by transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=48, n_embd=48, n_layer=3, n_head=4)).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    hf.save_pretrained(tmp_path)
    model, idx = GPT.from_pretrained(tmp_path), torch.randint(300, (3, 48))
    theirs = hf(idx, labels=idx)  # transformers shifts by itself
    assert theirs.logits.std() > 0.5, "the comparison means something"
    assert (model(idx)[0] - theirs.logits).abs().max() < 2e-4
    loss = model(idx[:, :-1], idx[:, 1:], return_logits=False)[1]
    assert loss.item() == pytest.approx(theirs.loss.item(), abs=1e-5)
    loss.backward()
    theirs.loss.backward()
    gradients = dict(hf.named_parameters())
    assert len(dict(model.named_parameters())) == len(gradients)
    for name, parameter in model.named_parameters():
        expected = gradients[name].grad
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            expected = expected.T  # transformers keeps (in, out)
        assert torch.allclose(parameter.grad, expected, atol=1e-5), name


def test_export_cuts_the_padding_off_and_transformers_agrees(tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model, enc = tiny_model(vocab_size=320), tokenizer.get_encoding("bytes")
    export_huggingface(model, enc, tmp_path / "hf")
    hf = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    idx = torch.randint(257, (2, 32))
    with torch.no_grad():
        ours, theirs = model(idx)[0], hf(idx).logits
    assert theirs.shape == (2, 32, 257)
    assert (ours[..., :257] - theirs).abs().max() < 2e-4
    text, their_tokenizer = "to be, or n\u00f6t \U0001f600", AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert their_tokenizer(text)["input_ids"] == list(text.encode()) and their_tokenizer.model_max_length == 32
    assert their_tokenizer.chat_template is None and hf.generation_config.eos_token_id == [256]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_targets_that_are_all_ignored_give_loss_0_and_no_gradient():
    model = tiny_model()
    idx = torch.randint(320, (2, 5))
    loss = model(idx, torch.full_like(idx, IGNORE_INDEX))[1]
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters())


def test_activation_checkpointing_changes_nothing_but_the_memory():
    idx = torch.randint(320, (2, 16))
    results = []
    for checkpointing in (False, True):
        model = tiny_model()
        model.activation_checkpointing = checkpointing
        loss = model(idx, idx.roll(-1, 1))[1]
        loss.backward()
        results.append([loss] + [p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_resize_pads_the_vocabulary_with_the_mean_and_cuts_positions():
    model = tiny_model(vocab_size=300)
    idx = torch.randint(300, (2, 16))
    before, mean = model(idx)[0], model.transformer.wte.weight.detach().mean(0)
    shape = dataclasses.asdict(model.config)
    model = GPT.from_state(*resize(shape, model.state_dict(), block_size=16, vocab_size=320))
    after = model(idx)[0]
    assert torch.allclose(before, after[..., :300], atol=1e-6)
    assert torch.equal(model.lm_head.weight[319], mean) and model.lm_head.weight is model.transformer.wte.weight
    assert (model.config.block_size, model.config.vocab_size) == (16, 320)
    assert len(model.transformer.wpe.weight) == 16
