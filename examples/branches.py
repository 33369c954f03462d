"""One text, four branches that go on from it at the same time, and a choice. Runs on a server or on a model of its own:

python examples/branches.py http://127.0.0.1:30000
python examples/branches.py demo
"""

from __future__ import annotations

import sys

from tierax import Engine, ProgramState, Runtime, assistant, function, gen, select, system, user

REPORT = (
    "The bridge at Aldwater was closed on Monday after a lorry struck the eastern railing. Engineers found no damage to the "
    "deck, but two bolts of a bearing must be replaced. The town expects the parts on Thursday. Until then buses turn at the "
    "station, and a ferry takes walkers and bicycles across from seven in the morning until nine in the evening."
)
QUESTIONS = ["When do the parts come?", "What was damaged?", "How do walkers cross?", "Where do buses turn?"]


@function(max_total_tokens=2000)
def read(s: ProgramState, report: str) -> None:
    s += system("You answer in one short sentence.")
    s += user(f"Read this:\n\n{report}")
    s += assistant("I have read it.")
    branches = s.fork(len(QUESTIONS))
    branches += lambda number: user(QUESTIONS[number])
    branches += assistant(gen("answer", max_tokens=24, temperature=0))
    branches.join()
    s += user("Is the bridge open?")
    s += assistant("The bridge is " + select("state", ["open", "closed"]) + ".")


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
    with Runtime(place) if place.startswith("http") else Engine(place) as backend:
        state = read.run(REPORT, backend=backend)
        for question, answer in zip(QUESTIONS, state["answer"], strict=True):
            print(f"{question}\n    {answer}")
        print(f"Is the bridge open?\n    {state['state']}: {state.get_meta_info('state').scores}")
        usage = state.usage()
        print(f"{usage.computed_tokens} of {usage.prompt_tokens} prompt tokens were computed")


if __name__ == "__main__":
    main()
