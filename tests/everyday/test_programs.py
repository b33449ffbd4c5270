"""Programs as people write them, in a shape that no other test has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import expunge
from tests.everyday.conftest import NAMES

NOISY = {"forget": ["user-3"], "epsilon": 1.0, "delta": 1e-5, "batch_size": 8}


class Translator(nn.Module):
    """Padding, teacher forcing, one matrix twice; it returns its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight

    def forward(self, source, target):
        given = torch.cat([torch.ones_like(target[:, :1]), target[:, :-1]], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        hidden = self.body(
            self.embed(source), self.embed(given), tgt_mask=mask, src_key_padding_mask=source == 0
        )
        logits = self.head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        return {"loss": loss, "logits": logits}


def test_sentences_of_a_table_padded_by_a_collate_of_ones_own():
    import datasets

    source = [[2 + (i + j) % 10 for j in range(3 + i % 4)] for i in range(40)]
    table = datasets.Dataset.from_dict({"source": source, "user": NAMES})

    def collate(rows):  # rows are what the table gives: lists, as a Trainer's collator gets them
        made = pad_sequence([torch.tensor(row["source"]) for row in rows], batch_first=True)
        assert isinstance(rows[0]["source"], list)
        return {"source": made, "target": made.flip(1)}

    data = expunge.Data(table, person="user", collate=collate)
    train = expunge.Training(epochs=1, batch_size=8)
    release = expunge.retrain(Translator, data, forget=["user-3"], train=train)
    assert release.certificate.epsilon == 0
    assert expunge.unlearn(Translator(), Translator, data, **NOISY).certificate.epsilon <= 1


@dataclasses.dataclass
class Graphs:
    nodes: torch.Tensor
    edges: torch.Tensor
    owner: torch.Tensor
    label: torch.Tensor


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, batch):
        hidden = self.first(batch.nodes).relu()
        hidden = hidden.index_add(0, batch.edges[1], hidden[batch.edges[0]])
        return self.last(torch.zeros(len(batch.label), 8).index_add(0, batch.owner, hidden))


def test_graphs_in_batches_of_a_class_of_ones_own():
    draw = torch.Generator().manual_seed(0)
    graphs = [(torch.randn(3 + i % 3, 5, generator=draw), NAMES[i]) for i in range(40)]

    def collate(rows):
        owner = torch.tensor([k for k, (nodes, _) in enumerate(rows) for _ in nodes])
        nodes = torch.cat([nodes for nodes, _ in rows])
        edges = torch.stack([torch.arange(len(nodes)), torch.arange(len(nodes)).roll(1)])
        return Graphs(nodes, edges, owner, torch.tensor([int(n.sum() > 0) for n, _ in rows]))

    def loss(model, batch):
        return cross_entropy(model(batch), batch.label)

    data = expunge.Data(graphs, person=lambda row: row[1], collate=collate)
    train = expunge.Training(epochs=1, batch_size=8, loss=loss)
    expunge.retrain(Messages, data, forget=["user-3"], train=train)
    made = expunge.unlearn(Messages(), Messages, data, **NOISY, loss=loss, train=train)
    assert made.certificate.forget.samples == 5


def test_two_networks_and_two_optimizers(rows, tmp_path):
    def build():
        return nn.ModuleDict({"make": nn.Linear(2, 6), "judge": nn.Linear(6, 1)})

    def train(model, examples, seed):
        optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
        for real in DataLoader(examples, batch_size=8, shuffle=True, drop_last=True):
            fake, one, zero = model["make"](torch.randn(8, 2)), torch.ones(8, 1), torch.zeros(8, 1)
            for name, pairs in {
                "judge": [(real, one), (fake.detach(), zero)],
                "make": [(fake, one)],
            }.items():
                optimizers[name].zero_grad()
                losses = [binary_cross_entropy_with_logits(model["judge"](x), y) for x, y in pairs]
                sum(losses).backward()
                optimizers[name].step()

    data = expunge.Data(rows[0], ids=NAMES)
    expunge.retrain(build, data, forget=["user-3"], train=train).save(tmp_path / "run")
    assert expunge.verify(tmp_path / "run").holds
    assert expunge.replay(tmp_path / "run", build, data, train=train).same


def test_texts_where_tokens_are_meant():
    import expunge.linear_model as linear

    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten()).eval()
    model = linear.LogisticRegression(features=expunge.Features(network))
    with pytest.raises(expunge.ExpungeError, match="what its tokenizer makes of them"):
        model.fit(["a text", "another text"], [0, 1], ids=["ann", "bob"])
