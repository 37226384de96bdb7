"""The bytes of a byte-level tokenizer's tokens (GPT-2, Radford et al. 2019): each character stands for one byte."""

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for the character of the same number; the others, in order, for the characters from 256 on."""
_HIDDEN = tuple(byte for byte in range(0x100) if byte not in _VISIBLE)
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}
"""The byte that each character stands for."""


def token_bytes(token: str) -> bytes:
    """Return the bytes of *token*; an added token, which has other characters, is plain text."""
    return bytes(BYTE_OF[char] for char in token) if BYTE_OF.keys() >= set(token) else token.encode()
