"""A small model, loss, optimizer and data of your own; docs/extending.md says how to train with them.

nanoscale train hooks.path=examples/hooks.py model=hooks optimizer=hooks data=hooks train.objective=hooks \
    hooks.settings.smoothing=0.1 train.steps=50
"""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A layer that mixes each token with the mean of all earlier ones."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return x + F.gelu(self.mix(self.norm(x.cumsum(1) / count[:, None])))


class TinyModel(nn.Module):
    """A model from tokens [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, vocab, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))  # sharded one by one
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(config):
    """Return the model; its initial values come from PyTorch's generator, seeded with train.seed."""
    return TinyModel(config.model.vocab, config.model.hidden, config.model.layers)


def loss(logits, targets, config):
    """Return the loss of each token: logits [tokens, vocab], targets [tokens], of which -100 do not count."""
    smoothing = config.hooks.settings.get("smoothing", 0.0)
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def optimizer(groups, config):
    """Return PyTorch's optimizer for groups of parameters, each with its weight decay and names."""
    return torch.optim.RMSprop(groups, lr=config.optimizer.lr)


class Counting(torch.utils.data.Dataset):
    """Samples that count upwards in steps of 1, 2 or 3."""

    def __init__(self, samples, seq_len, vocab):
        self.samples, self.seq_len, self.vocab = samples, seq_len, vocab

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return (number + torch.arange(self.seq_len + 1) * (1 + number % 3)) % self.vocab


def data(config, split):
    """Return the samples of "train" or "valid", each of seq_len + 1 token ids."""
    samples = 10_000 if split == "train" else 100
    return Counting(samples, config.train.seq_len, config.model.vocab)


def on_step_end(moment):
    """Do something after each step, on every rank."""
    if moment.rank == 0 and moment.metrics is not None:
        with (moment.run / "losses.txt").open("a") as file:
            print(moment.step, moment.metrics["loss"], file=file)
