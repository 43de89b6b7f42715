#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_table.c: what the pre-tokeniser must know of every code point.

    pip install unicodedata2==16.0.0
    python3 tools/unicode/generate.py

The version is fixed because a newer Unicode turns unassigned code points into letters, and that
changes token ids. Unicode 16 is what `tokenizers` 0.21.2 and later use.
"""
import pathlib
import sys

import unicodedata2

VERSION = "16.0.0"
BLOCK = 128
OUT = pathlib.Path(__file__).resolve().parents[2] / "src/tokenizer/unicode_table.c"

# The values of bml_unicode_class and the bit BML_UNICODE_WORD in src/tokenizer/unicode.h.
OTHER, LETTER, NUMBER, SPACE, WORD = 0, 1, 2, 3, 4

# The property White_Space, which is \s in the Rust regex crate.
WHITE_SPACE = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028,
               0x2029, 0x202F, 0x205F, 0x3000}

# \w beyond the general categories below: Join_Control, and the symbols that are Alphabetic.
WORD_SYMBOLS = {0x200C, 0x200D, *range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A),
                *range(0x1F150, 0x1F16A), *range(0x1F170, 0x1F18A)}


def classify(code_point):
    category = unicodedata2.category(chr(code_point))
    word = category[0] in "LM" or category in ("Nd", "Nl", "Pc") or code_point in WORD_SYMBOLS
    if code_point in WHITE_SPACE:
        return SPACE
    kind = LETTER if category[0] == "L" else NUMBER if category[0] == "N" else OTHER
    return kind | (WORD if word else 0)


def rows(values, width):
    line = "   "
    for value in values:
        text = f" {value},"
        if len(line) + len(text) > width:
            yield line
            line = "   "
        line += text
    yield line


def main():
    if unicodedata2.unidata_version != VERSION:
        sys.exit(f"unicodedata2 has Unicode {unicodedata2.unidata_version}, not {VERSION}: "
                 f"pip install unicodedata2=={VERSION}")
    blocks, index = {}, []
    for start in range(0, 0x110000, BLOCK):
        block = bytes(classify(c) for c in range(start, start + BLOCK))
        index.append(blocks.setdefault(block, len(blocks)))
    assert len(blocks) <= 256, "the index needs 16 bits"
    out = ["/* Made by tools/unicode/generate.py from Unicode 16.0.0. Do not edit. */",
           "/* clang-format off */",
           '#include "tokenizer/unicode.h"',
           "",
           "const uint8_t bml_unicode_index[0x110000 / 128] = {",
           *rows(index, 100),
           "};",
           "",
           "const uint8_t bml_unicode_blocks[][128] = {"]
    for block in blocks:
        out += ["    {", *rows(block, 100), "    },"]
    out += ["};", ""]
    OUT.write_text("\n".join(out))
    print(f"{OUT}: {len(index)} index entries, {len(blocks)} blocks of {BLOCK}")


if __name__ == "__main__":
    main()
