"""The model compared with transformers' GPT-2, a loop and numbers worked by hand."""

import dataclasses
import math

import pytest
import tokenizer
import torch
import torch.nn.functional as F
import train_gpt2
from plumbing.checkpoint import resize
from plumbing.distributed import has_float8
from plumbing.huggingface import export_huggingface
from plumbing.kernels import attention_on_cpu
from train_gpt2 import GPT, IGNORE_INDEX, GPTConfig

from harness import tiny_model

# ----- Shape and initial weights ------------------------------------------------------------------------


def meta_model(**changes):
    """A model of full size that takes no memory."""
    with torch.device("meta"):
        return GPT(GPTConfig(**changes))


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_gpt2_has_124_439_808_parameters_at_50257_ids():
    """wte 50257*768 + wpe 1024*768 + 12 * (12*768^2 + 13*768) + ln_f 2*768: tied, so the head adds none."""
    assert 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768 == 124_439_808
    assert num_parameters(meta_model(vocab_size=50257)) == 124_439_808
    assert num_parameters(meta_model()) == 124_439_808 + (50304 - 50257) * 768


# what the GPT-2 release says of its sizes, embeddings included
@pytest.mark.parametrize(
    "preset, millions", [("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-xl", 1558)]
)
def test_presets_have_the_sizes_of_openais_models(preset, millions):
    c = train_gpt2.PRESETS[preset]
    model = meta_model(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, vocab_size=50257)
    assert round(num_parameters(model) / 1e6) == millions
    assert c.n_embd // c.n_head == 64


def test_weight_decay_falls_on_50_tensors_and_spares_98():
    (adamw,) = train_gpt2.configure_optimizers(meta_model(), train_gpt2.TrainConfig())
    decayed, spared = adamw.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (50, 124_354_560)
    assert (len(spared["params"]), sum(p.numel() for p in spared["params"])) == (98, 121_344)
    assert adamw.defaults["betas"] == (0.9, 0.95) and adamw.defaults["eps"] == 1e-8
    (adamw,) = train_gpt2.configure_optimizers(tiny_model(), train_gpt2.TrainConfig())
    assert adamw.defaults["fused"]  # which a model without memory cannot have


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    muon, adamw = train_gpt2.configure_optimizers(meta_model(), train_gpt2.TrainConfig(optimizer="muon"))
    assert sum(p.numel() for group in muon.param_groups for p in group["params"]) == 12 * 12 * 768**2
    decayed, spared = adamw.param_groups
    assert sum(p.numel() for p in decayed["params"]) == (50304 + 1024) * 768
    assert (len(spared["params"]), sum(p.numel() for p in spared["params"])) == (98, 121_344)


def test_attention_on_a_cpu_is_in_float32_even_under_autocast():
    """The result is that of float32 attention on the bfloat16 queries, keys and values, rounded once."""
    q, k, v = torch.randn(3, 2, 4, 16, 8).bfloat16()
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_on_cpu(q, k, v, is_causal=True), expected)


@pytest.mark.skipif(not has_float8("cpu"), reason="this processor does not multiply float8 matrices")
def test_only_training_computes_the_logits_in_8_bits():
    model, idx = tiny_model(), torch.randint(320, (2, 16))
    logits = model(idx)[0]
    exact = model(idx, idx, return_logits=False)[1]
    model.float8_lm_head = True
    assert torch.equal(model(idx)[0], logits)
    rough = model(idx, idx, return_logits=False)[1]
    assert rough != exact
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0)


def test_initial_weights_are_gpt2s():
    """std 0.02, residual projections 0.02 / sqrt(2 * 8 layers) = 0.005; zero biases, unit norms."""
    model = GPT(GPTConfig(block_size=256, vocab_size=1024, n_layer=8, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.005 if name.endswith("c_proj.weight") else 0.02
            # the standard error of a std of n numbers is std / sqrt(2n): under 0.6% from 16,384 on
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


# ----- Compared with transformers -----------------------------------------------------------------------


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
    text = "to be, or n\u00f6t \U0001f600"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == list(text.encode())
    assert not (tmp_path / "hf.part").exists()


# ----- Forward ------------------------------------------------------------------------------------------


def test_a_token_does_not_see_the_future():
    model = tiny_model()
    idx = torch.randint(320, (1, 32))
    with torch.no_grad():
        before = model(idx)[0]
        for t in (0, 7, 31):
            changed = idx.clone()
            changed[0, t] = (idx[0, t] + 1) % 320
            after = model(changed)[0]
            assert torch.equal(before[:, :t], after[:, :t])
            # with random weights every position from t on sees it
            assert (before[:, t:] != after[:, t:]).any(-1).all()


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
    assert torch.equal(before, after[..., :300]) or torch.allclose(before, after[..., :300], atol=1e-6)
    assert torch.equal(model.lm_head.weight[319], mean) and model.lm_head.weight is model.transformer.wte.weight
    assert (model.config.block_size, model.config.vocab_size) == (16, 320)
    assert len(model.transformer.wpe.weight) == 16
