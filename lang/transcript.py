"""What one state of a program consists of so far: the tokens that the model knows, and the text that it does not know yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Transcript:
    """The ids stay what they are: what was read or written once is never tokenized again, so that its KV is found in the
    cache. A text becomes ids only when the model is to go on behind it, all of it at once, as in a prompt."""

    ids: list[int] = field(default_factory=list)
    pending: str = ""
    """Text behind the ids."""
    paid: int = 0
    """Tokens of the pending text that the budget has been told of: it is that of several branches."""
    text: str = ""
    """All of it, chat template and answers included."""
    roles: list[str] = field(default_factory=list)
    """Of the messages so far."""
    contents: list[str] = field(default_factory=list)
    """Their texts."""
    open: bool = False
    """The last message has not ended."""

    def copy(self) -> Transcript:
        """For a branch."""
        lists = {"ids": list(self.ids), "roles": list(self.roles), "contents": list(self.contents)}
        return replace(self, **lists)

    def add(self, text: str) -> None:
        """Adds to the text and to the open message, if there is one."""
        self.pending += text
        self.note(text)

    def add_frame(self, text: str) -> None:
        """Adds what the chat template writes around messages."""
        self.pending += text
        self.text += text

    def add_known(self, ids: list[int], text: str) -> None:
        """Adds what the model has read or written behind all of the ids; there is no text between."""
        assert not self.pending
        self.ids += ids
        self.note(text)

    def note(self, text: str) -> None:
        """The text is there, in whatever form."""
        self.text += text
        if self.open:
            self.contents[-1] += text

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages in OpenAI's form."""
        return [{"role": role, "content": text} for role, text in zip(self.roles, self.contents, strict=True)]
