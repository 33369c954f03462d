"""A batch of prompts with a long prefix in common: it is prefilled once, whatever the order of the prompts.

python examples/offline_batch.py [MODEL]
"""

from __future__ import annotations

import sys

from tierax import LLM, SamplingParams

MANUAL = (
    "You answer questions about the Lumen 3 lamp from its manual.\n\n"
    "Manual. The Lumen 3 has three modes. Press the button once for steady light, twice for the night light, three "
    "times for signals. A full charge lasts nine hours in steady mode and sixty as a night light. The lamp is "
    "water-tight down to two metres. Charge it with any USB-C cable; a red ring shows that it charges, a green one "
    "that it is full. To reset it, hold the button for ten seconds.\n\n"
)
QUESTIONS = [
    "How do I turn on the night light?",
    "How long does a charge last?",
    "Can I take it into the rain?",
    "What does the red ring mean?",
    "How is the lamp reset?",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    prompts = [f"{MANUAL}Question: {question}\nAnswer:" for question in QUESTIONS]
    params = SamplingParams(max_tokens=32, temperature=0, stop=["\n"])
    with LLM(model) as llm:
        outputs = llm.generate([*prompts, "\ud800 is no text"], params)
    for question, output in zip([*QUESTIONS, "(a bad prompt)"], outputs, strict=True):
        if output.error is not None:
            print(f"{question}\n    error: {output.error}")
        else:
            print(f"{question}\n   {output.text}")
            print(f"    {output.cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")


if __name__ == "__main__":
    main()
