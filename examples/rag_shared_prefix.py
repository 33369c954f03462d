"""Questions about a long document: the document first, the question last, so that it is prefilled once.

python examples/rag_shared_prefix.py [MODEL]

The same questions are asked again with the question first, which looks alike and shares nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tierax import LLM, Output, SamplingParams

FACTS = [
    ("lighthouse", "stands on the northern mole", "flashes every nine seconds"),
    ("ferry", "leaves from the stone quay", "crosses the bay in forty minutes"),
    ("market", "is held below the town hall", "opens at seven on Saturdays"),
    ("mill", "turns at the lower weir", "grinds rye and buckwheat"),
    ("library", "fills the old customs house", "lends nine books at a time"),
    ("observatory", "crowns the western hill", "opens on clear Fridays"),
]
DOCUMENT = " ".join(
    f"{number}. The {name} of Aldwater {where} and {what}. It is looked after by keeper number {number}."
    for number, (name, where, what) in enumerate(FACTS * 4, 1)
)
QUESTIONS = [
    "Where does the ferry leave from?",
    "When does the market open?",
    "What does the mill grind?",
    "How many books does the library lend?",
]


def document_first(question: str) -> str:
    return f"A guide to Aldwater:\n\n{DOCUMENT}\n\nQuestion: {question}\nAnswer:"


def question_first(question: str) -> str:
    return f"Question: {question}\n\nA guide to Aldwater:\n\n{DOCUMENT}\n\nAnswer:"


def ask(llm: LLM, prompts: Sequence[str]) -> tuple[float, list[Output]]:
    """Seconds, and the answers. One at a time, as users come."""
    params = SamplingParams(max_tokens=16, temperature=0, stop=["\n"])
    started = time.perf_counter()
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return time.perf_counter() - started, outputs


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for title, form in (("document first", document_first), ("question first", question_first)):
            seconds, outputs = ask(llm, [form(question) for question in QUESTIONS])
            print(f"{title}: {seconds:.2f} s")
            for question, output in zip(QUESTIONS, outputs, strict=True):
                cached, prompt = output.cached_tokens, len(output.prompt_token_ids)
                print(
                    f"  {question} {output.text.strip()}\n    {cached} of {prompt} prompt tokens were cached"
                )


if __name__ == "__main__":
    main()
