"""SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3) for the matrices that Muon takes.

Shampoo keeps averages of G @ G.mT and G.mT @ G for each gradient G. SOAP takes their eigenvectors as a basis that turns
slowly, and runs Adam in it. Groups are those of train_gpt2.configure_optimizers: matrices of one shape, done as a
batch. SOAP-Muon, as the benchmark's newest entries call it, orthogonalizes that update.
"""

import torch


class SOAP(torch.optim.Optimizer):
    """every: steps between updates of the basis, each one QR step of orthogonal iteration (the paper's algorithm 4).

    orthogonalize: None, or for SOAP-Muon the function that does it.
    """

    def __init__(self, groups, lr, weight_decay, every, orthogonalize=None, betas=(0.95, 0.95), eps=1e-8):
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, every=every, betas=betas, eps=eps, split=1))
        self.orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, (beta1, beta2) = group["params"], group["betas"]
            rows, cols = params[0].size(0) // group["split"], params[0].size(1)
            G = torch.stack([p.grad for p in params]).view(-1, rows, cols).float()
            state = self.state[params[0]]  # one state for the group's batch of n matrices
            if not state:
                # the first gradient only sets the basis, as in the paper's code: nothing is updated
                state.update(step=0, left=G @ G.mT, right=G.mT @ G)
                state.update(m=torch.zeros_like(G), v=torch.zeros_like(G))
                # eigh sorts upwards; orthogonal iteration keeps the largest eigenvalues first
                state.update({f"Q_{side}": torch.linalg.eigh(state[side]).eigenvectors.flip(-1)
                              for side in ("left", "right")})  # fmt: skip
                continue
            state["step"] += 1
            left, right = state["Q_left"], state["Q_right"]  # (n, rows, rows), (n, cols, cols)
            state["m"].lerp_(G, 1 - beta1)  # in the weights' own basis, so it survives a turn of the other
            rotated = left.mT @ G @ right
            state["v"].lerp_(rotated.square(), 1 - beta2)
            m = left.mT @ state["m"] @ right / (1 - beta1 ** state["step"])
            v = state["v"] / (1 - beta2 ** state["step"])
            updates = left @ (m / (v.sqrt() + group["eps"])) @ right.mT
            lr = group["lr"]
            if self.orthogonalize:
                updates = self.orthogonalize(updates).float()
                lr *= max(1, rows / cols) ** 0.5  # as in Muon
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates.reshape(len(params), -1, cols)), alpha=-lr)

            state["left"].lerp_(G @ G.mT, 1 - beta2)
            state["right"].lerp_(G.mT @ G, 1 - beta2)
            if state["step"] % group["every"] == 0:
                for side in ("left", "right"):
                    state[f"Q_{side}"] = torch.linalg.qr(state[side] @ state[f"Q_{side}"]).Q
