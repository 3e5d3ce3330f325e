"""Train a small encoder to tell passages of *Opticks* from the same letters in another order.

The classifier reads the first token's state, to which attention must bring what the others know.
Printed is how often it is right on passages that it never saw; guessing is right in half.
"""

import argparse

import torch
from _options import add_numbers

from adaattn.evaluation.corpus import load_text
from adaattn.models import Encoder, TransformerConfig


def draw(text, count, length):
    """Return passages as numbers of letter pairs, [count, length - 1], and 1 where shuffled."""
    starts = torch.randint(len(text) - length, (count, 1))
    letters = text[starts + torch.arange(length)]
    shuffled = torch.rand(count) < 0.5
    orders = torch.rand(count, length).argsort(-1)
    letters = torch.where(shuffled[:, None], letters.gather(1, orders), letters)
    return letters[:, :-1] * 128 + letters[:, 1:], shuffled.long()


def accuracy(model, text, options):
    """Return how often the model is right on 500 passages."""
    passages, labels = draw(text, 500, options.length)
    with torch.inference_mode():
        return (model.eval()(passages).logits.argmax(-1) == labels).float().mean().item()


def main():
    """Train, and print what the model learned and how its attention ran."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = torch.tensor(list(load_text("opticks").encode("ascii", "replace")))
    training, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    add_numbers(parser, longest=len(unseen) - 1, steps=120, batch=32, length=64)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    sizes = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "pooler": True, "num_labels": 2}
    model = Encoder(TransformerConfig(vocab_size=128 * 128, attention="ada", **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print(f"before training: right in {accuracy(model, unseen, options):.1%}")
    for step in range(1, options.steps + 1):
        passages, labels = draw(training, options.batch, options.length)
        loss = model.train()(passages, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(options.steps // 4, 1) == 0:
            right = accuracy(model, unseen, options)
            print(f"step {step}: loss {loss.item():.3f}, right in {right:.1%}", flush=True)
    for name in ("calls", "flash_ratio", "share_by_method", "calls_by_executor"):
        print(f"{name}: {model.get_statistics()[name]}")


if __name__ == "__main__":
    main()
