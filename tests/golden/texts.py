"""The prompts behind the reference values: written for this project, deterministic, of any length."""

from __future__ import annotations

PROMPTS: tuple[tuple[str, int | None], ...] = (
    ("word", 1),
    ("english", 2),
    ("emoji", 5),
    ("chinese", 9),
    ("english", 16),
    ("chat", None),
    ("code", 33),
    ("chinese", 64),
    ("chat-long", None),
    ("emoji", 100),
    ("english", 127),
    ("code", 200),
    ("mixed", 256),
    ("chinese", 333),
    ("english", 512),
    ("code", 700),
    ("mixed", 1000),
    ("english", 1201),
    ("chinese", 1500),
    ("english", 1900),
)
"""`(kind, length)`: cut to `length` tokens, or left whole."""

_PLACES = (
    "harbour",
    "library",
    "orchard",
    "lighthouse",
    "market",
    "bridge",
    "mill",
    "station",
    "quarry",
    "garden",
)
_PEOPLE = ("Mara", "Oskar", "Ines", "Tobias", "Leila", "Piet", "Nadia", "Hugo", "Wanda", "Emil")
_GOODS = (
    "lamp oil",
    "apples",
    "maps",
    "rope",
    "copper wire",
    "blue paint",
    "salt",
    "clocks",
    "wool",
    "glass",
)
_COLOURS = "🔴🟠🟡🟢🔵🟣⚫⚪🟤"
_ANIMALS = "🐙🦊🐢🦉🐝🦋🐳🦔🐌"

_CHINESE = (
    "清晨的港口很安静，只有几艘小船在雾里慢慢移动。",
    "老师把第{n}本书放在窗边，请学生们轮流朗读。",
    "图书馆有三层楼：第一层放新书，第二层放地图，第三层放旧报纸。",
    "他说：“如果明天下雨，我们就在屋里下棋。”",
    "价格是{n}元，比上个月便宜了一点。",
)


def prompt_text(kind: str, length: int | None) -> str:
    """Text of a kind, with more than `length` tokens if a length is given."""
    lines = 4 + (length or 0) // 8
    match kind:
        case "word":
            return "Once upon"
        case "english":
            return " ".join(_english(n) for n in range(lines))
        case "chinese":
            return "".join(_CHINESE[n % len(_CHINESE)].format(n=n + 3) for n in range(lines))
        case "emoji":
            return "".join(_emoji(n) for n in range(lines))
        case "code":
            return "\n\n".join(_code(n) for n in range(lines))
        case "mixed":
            return "\n".join(
                (_english(n), _CHINESE[n % 5].format(n=n), _code(n), _emoji(n))[n % 4] for n in range(lines)
            )
        case "chat":
            return _chat("What is the capital of France?")
        case "chat-long":
            return _chat("Sum up these notes in one sentence.\n" + "\n".join(_english(n) for n in range(6)))
    raise ValueError(f"no prompt of kind {kind!r}")


def _english(n: int) -> str:
    person, other = _PEOPLE[n % 10], _PEOPLE[(3 * n + 1) % 10]
    place, goods = _PLACES[(7 * n) % 10], _GOODS[(n // 2) % 10]
    sentences = (
        f"{person} walked to the {place} before sunrise and counted {n + 2} crates of {goods}.",
        f"In the evening {other} asked why the {place} had been closed for {2 * n + 1} days.",
        f'"There is no {goods} left," said {person}, "unless the ship from the north arrives on time."',
        f"The ledger on page {n} says that {other} paid {5 * n}.50 for {goods}; nobody at the {place} remembers it.",
    )
    return sentences[n % 4]


def _emoji(n: int) -> str:
    return f"{_ANIMALS[n % 9]}{_COLOURS[(2 * n) % 9]} = {n}! 👩‍🚀🇨🇭 "


def _code(n: int) -> str:
    name = _PLACES[n % 10]
    return (
        f"def {name}_{n}(items: list[int], limit: int = {n * 3}) -> int:\n"
        f'    """Sums the items of the {name} below the limit."""\n'
        f"    total = 0\n"
        f"    for index, item in enumerate(items):\n"
        f"        if item < limit and index % {n + 2} == 0:\n"
        f"            total += item * {n}\n"
        f"    return total"
    )


def _chat(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
