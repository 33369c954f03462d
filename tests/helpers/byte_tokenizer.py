"""A tokenizer whose ids 0..255 are bytes, for tests that need real text without a model file."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tierax.engine.tokenizer import Tokenizer
from tierax.engine.tokenizer_gguf import BYTE_OF_CHAR

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    *, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE, more_specials: tuple[str, ...] = ()
) -> Tokenizer:
    """Vocabulary of `VOCAB_SIZE`: id b is the byte b, then the specials; EOS and IM_END end an answer.

    `more_specials` get the ids from `VOCAB_SIZE` on.
    """
    backend = tokenizers.Tokenizer(models.BPE(dict(BYTE_OF_CHAR), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (*SPECIALS, *more_specials)])
    return Tokenizer(
        backend,
        bos_id=BOS,
        eos_id=EOS,
        eos_ids=[IM_END],
        add_bos=add_bos,
        chat_templates={"default": chat_template} if chat_template is not None else None,
    )
