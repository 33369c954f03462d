"""Makes the reference values in this folder with transformers and torch, in float32 on the CPU.

    python tests/golden/make_golden.py demo PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/golden/make_golden.py tiny
    python tests/golden/make_golden.py rope

Needs torch, transformers, gguf and safetensors; nothing of tierax is used. Run it again only when a prompt or a
model of the set changes: the tests compare with the files that are here.

`demo.json` / `demo.npz`: 20 prompts (kind, text or null, ids) and, for each, 64 greedy tokens (end tokens do not stop
them) `tokens` int32 [20, 64], their log-probs `logprobs` float32 [20, 64] and the gap between the two likeliest
candidates' logits `gaps` float32 [20, 64]. A comparison ends at the first position whose gap is below 1e-3.

`tiny.npz`: `ids` int32 [8193], `positions` int32 [12], and for each model of `helpers.tiny_models` the log-probs of
the whole vocabulary at these positions, float32 [12, 256].

`rope.npz`: for each config in `rope.json` the frequencies `NAME`, the scale `NAME/scale`, and cos and sin at positions
0, 1000, 8192 and 20000, `NAME/cos` and `NAME/sin`, float32 [4, head_dim // 2].
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.texts import PROMPTS, prompt_text

from helpers.tiny_models import TINY_MODELS, write_tiny_checkpoint

HERE = Path(__file__).parent
NEW_TOKENS = 64
POSITIONS = (0, 1, 5, 31, 63, 64, 200, 1000, 2048, 4096, 8191, 8192)


def make_demo(gguf: Path) -> None:
    tokenizer = demo_tokenizer(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompts, tokens, logprobs, gaps = [], [], [], []
    for kind, length in PROMPTS:
        text = prompt_text(kind, length)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if length is not None:
            ids = ids[:length]
            assert len(ids) == length, f"the {kind} text is too short for {length} tokens"
            text = tokenizer.decode(ids, skip_special_tokens=False)
        whole = tokenizer.encode(text, add_special_tokens=False).ids == ids
        prompts.append({"kind": kind, "text": text if whole else None, "ids": ids})
        chosen, chosen_logprobs, chosen_gaps = greedy(model, ids)
        print(
            f"{kind:8} {len(ids):5} tokens  least gap {min(chosen_gaps):.2e}  {tokenizer.decode(chosen)[:60]!r}"
        )
        tokens.append(chosen)
        logprobs.append(chosen_logprobs)
        gaps.append(chosen_gaps)
    (HERE / "demo.json").write_text(json.dumps(prompts, ensure_ascii=False, separators=(",", ":")) + "\n")
    np.savez_compressed(
        HERE / "demo.npz",
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        gaps=np.array(gaps, np.float32),
    )


def demo_tokenizer(gguf: Path) -> Tokenizer:
    """transformers does not read the file's pre-tokenizer (`smollm`: digits one by one); this adds it."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).backend_tokenizer
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return tokenizer


@torch.inference_mode()
def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, their log-probs, and the gaps between the best two logits."""
    tokens: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    while True:
        logits = output.logits[0, -1].float()
        best = torch.topk(logits, 2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(torch.log_softmax(logits.double(), -1)[tokens[-1]]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(tokens) == NEW_TOKENS:
            return tokens, logprobs, gaps
        output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)


@torch.inference_mode()
def make_tiny() -> None:
    ids = np.random.default_rng(7).integers(0, 256, POSITIONS[-1] + 1).astype(np.int32)
    arrays = {"ids": ids, "positions": np.array(POSITIONS, np.int32)}
    for name in TINY_MODELS:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_checkpoint(directory, name)
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="sdpa"
            )
            logits = model(
                torch.tensor(ids[None].astype(np.int64)), logits_to_keep=torch.tensor(POSITIONS)
            ).logits[0]
        arrays[name] = torch.log_softmax(logits.double(), -1).float().numpy()
        print(f"{name:16} best log-probs {np.round(arrays[name].max(-1), 2).tolist()}")
    for first, second in itertools.combinations(TINY_MODELS, 2):
        assert not np.allclose(arrays[first][-1], arrays[second][-1], atol=0.1), (first, second)
    np.savez_compressed(HERE / "tiny.npz", **arrays)


@torch.inference_mode()
def make_rope() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, changes in json.loads((HERE / "rope.json").read_text()).items():
        heads = {"hidden_size": 4 * changes["head_dim"], "num_attention_heads": 4}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**heads, **changes))
        cos, sin = rotary(torch.zeros(1, 1), torch.tensor([[0, 1000, 8192, 20_000]]))
        half = changes["head_dim"] // 2
        arrays[name] = rotary.inv_freq.numpy()
        arrays[name + "/scale"] = np.float64(rotary.attention_scaling)
        arrays[name + "/cos"], arrays[name + "/sin"] = cos[0, :, :half].numpy(), sin[0, :, :half].numpy()
    np.savez_compressed(HERE / "rope.npz", **arrays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo").add_argument("gguf", type=Path)
    commands.add_parser("tiny")
    commands.add_parser("rope")
    arguments = parser.parse_args()
    match arguments.command:
        case "demo":
            make_demo(arguments.gguf.absolute())
        case "tiny":
            make_tiny()
        case "rope":
            make_rope()
