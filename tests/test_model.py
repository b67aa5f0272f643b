"""The model compared with transformers' GPT-2, a loop and numbers worked by hand."""

import pytest
import torch
from train_gpt2 import GPT

from harness import tiny_model

pytestmark = pytest.mark.gpt2


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


@pytest.mark.parametrize("dtype, expected", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_residual_stream_is_in_bfloat16_or_float32(dtype, expected):
    """float16's numbers end at 65,504, which the sums of many blocks may reach."""
    model, seen = tiny_model(), []
    model.transformer.h[1].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype):
        model(torch.tensor([[1, 2, 3]]))
    assert seen == [expected]
