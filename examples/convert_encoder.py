"""Put adaptive attention into a `torch.nn.TransformerEncoder`, and compare before and after.

The batch is padded. Errors are against the same encoder in float64, over tokens without padding.
"""

import argparse
import copy
import time

import torch
from _options import add_numbers, one_line_errors
from torch import nn

from adaattn import convert
from adaattn.attention import AttentionStatistics, BaseAttention


def run(encoder, inputs, padding):
    """Return the outputs [N, E] of tokens that are no padding, and the fastest of 5 runs in ms."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        with torch.inference_mode():
            outputs = encoder(inputs, src_key_padding_mask=padding)
        seconds.append(time.perf_counter() - start)
    return outputs[~padding], 1e3 * min(seconds)


def main():
    """Convert, and print the report, the errors, the times and the statistics."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_numbers(parser, layers=4, width=256, heads=4, batch=4, length=256)
    parser.add_argument("--policy", default="quality", help="quality, balanced, speed or a file")
    options = parser.parse_args()
    if options.width % options.heads:
        parser.error(f"argument --heads: expected a divisor of the width, {options.width}")
    torch.manual_seed(options.seed)
    layer = nn.TransformerEncoderLayer(options.width, options.heads, batch_first=True)
    encoder = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False).eval()
    inputs = torch.randn(options.batch, options.length, options.width)
    lengths = torch.linspace(options.length // 2, options.length, options.batch).long()
    padding = torch.arange(options.length) >= lengths[:, None]

    exact, _ = run(copy.deepcopy(encoder).double(), inputs.double(), padding)
    before, before_ms = run(encoder, inputs, padding)
    with one_line_errors(parser):
        print(convert(encoder, "ada", policy=options.policy))
    after, after_ms = run(encoder, inputs, padding)
    print(f"largest difference of outputs before and after: {(after - before).abs().max():.1e}")
    for name, found, ms in (("before", before, before_ms), ("after", after, after_ms)):
        print(f"{name:6}  largest error {(found - exact).abs().max():.1e}, {ms:.1f} ms")
    modules = [module for module in encoder.modules() if isinstance(module, BaseAttention)]
    found = AttentionStatistics.merge(module.get_statistics() for module in modules)
    for name in ("calls", "flash_ratio", "share_by_method", "calls_by_executor"):
        print(f"{name}: {found[name]}")


if __name__ == "__main__":
    main()
