"""A GGUF file as a directory of the Hugging Face form with weights in float32, for engines that read no GGUF; run by an interpreter that
has transformers with accelerate and gguf, and knows nothing of tierax.

python hf_directory.py FILE.gguf DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]


def main(file: str, directory: str) -> None:
    folder, name = os.path.split(file)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # Its own `save_pretrained` refuses what was read from a quantised file, though the weights are plain by now.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    Path(directory, "config.json").write_text(json.dumps(config, indent=1, default=str))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
    save_file(weights, Path(directory, "model.safetensors"), metadata={"format": "pt"})
    print(directory, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
