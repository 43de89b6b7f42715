#!/usr/bin/env python3
"""Compares libbml's tokenizer with `tokenizers` and `tiktoken` on more than the tests do.

    python3 tools/reference/tokenizer_check.py build/libbml.so [--strings 100000] [--seed 1]

Both vocabularies are compared on the nasty strings, on random strings over all Unicode planes, on
the whole held-out corpus and on every code point, and with random added tokens with random flags.
Exit status 1 and the first differences if there are any.
"""
import argparse
import ctypes
import json
import pathlib
import random
import shutil
import sys
import tempfile

from tokenizer_cases import (DIRECTORIES, DIRECTORY_TEXTS, END_OF_TEXT, NASTY, VOCABULARIES, Tokenizer, corpus,
                             encode, random_added, random_added_text, random_string, random_strings,
                             read_vocabulary, reference)


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 1024)]


class Bml:
    """A tokenizer of libbml."""

    def __init__(self, library, directory):
        self.lib, self.error, self.handle = library, Error(), ctypes.c_void_p()
        if library.bml_tokenizer_load(str(directory).encode(), ctypes.byref(self.handle),
                                      ctypes.byref(self.error)):
            raise RuntimeError(self.error.message.decode())

    def encode(self, text, parse_special):
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        ids, n = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_size_t()
        if self.lib.bml_tokenize(self.handle, data, ctypes.c_size_t(len(data)), ctypes.c_bool(parse_special),
                                 ctypes.byref(ids), ctypes.byref(n), ctypes.byref(self.error)):
            raise RuntimeError(self.error.message.decode())
        out = ids[: n.value]
        self.lib.bml_free(ids)
        return out

    def decode(self, ids):
        text, n = ctypes.c_void_p(), ctypes.c_size_t()
        array = (ctypes.c_int32 * len(ids))(*ids)
        if self.lib.bml_detokenize(self.handle, array, ctypes.c_size_t(len(ids)), ctypes.byref(text),
                                   ctypes.byref(n), ctypes.byref(self.error)):
            raise RuntimeError(self.error.message.decode())
        out = ctypes.string_at(text, n.value)
        self.lib.bml_free(text)
        return out

    def close(self):
        self.lib.bml_tokenizer_free(self.handle)


class Report:
    def __init__(self):
        self.failures = 0

    def compare(self, what, text, got, want):
        if got == want:
            return
        self.failures += 1
        if self.failures <= 20:
            print(f"DIFFERENT {what}: {text[:200]!r}\n  bml       {got[:40]}\n  reference {want[:40]}")


def tiktoken_encoding(directory):
    """tiktoken wants ranked bytes; GPT-2's ids are the ranks."""
    import tiktoken

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    to_byte = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    vocab, _ = read_vocabulary(directory)
    ranks = {bytes(to_byte[c] for c in token): i for token, i in vocab.items() if token != END_OF_TEXT}
    return tiktoken.Encoding(
        "bml", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: vocab[END_OF_TEXT]},
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


def check_vocabulary(report, library, name, directory, strings):
    mine, theirs, third = Bml(library, directory), reference(directory), tiktoken_encoding(directory)
    count = 0
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    blocks = ["".join(f"{c}{c} {c}x {c}" for c in every[i : i + 64]) for i in range(0, len(every), 64)]
    for text in NASTY + strings + blocks:
        for special in (False, True):
            got = mine.encode(text, special)
            report.compare(f"{name} special={special}", text, got, encode(theirs, text, special))
            if mine.decode(got) != text.encode("utf-8"):
                report.compare(f"{name} round trip", text, list(mine.decode(got)), list(text.encode("utf-8")))
        report.compare(f"{name} tiktoken", text, mine.encode(text, False), third.encode_ordinary(text))
        count += 1
    text = corpus()
    if text:
        for special in (False, True):
            got = mine.encode(text, special)
            report.compare(f"{name} corpus special={special}", "", got, encode(theirs, text, special))
        report.compare(f"{name} corpus tiktoken", "", mine.encode(text, False), third.encode_ordinary(text))
        print(f"{name}: corpus of {len(text)} characters: {len(got)} ids")
    print(f"{name}: {count} strings, every code point among them")
    mine.close()


def check_invalid(report, library, directory, rng, count):
    """Invalid bytes: the ids give the bytes back, and cut where U+FFFD for each byte would."""
    mine = Bml(library, directory)
    vocab, _ = read_vocabulary(directory)
    cutter = reference(directory).pre_tokenizer
    for _ in range(count):
        data = bytearray(random_string(rng).encode("utf-8"))
        for _ in range(rng.randint(1, 4)):
            at = rng.randint(0, len(data))
            if data and rng.random() < 0.5:
                del data[min(at, len(data) - 1)]
            else:
                data[at:at] = bytes([rng.choice((rng.randrange(256), 0x80, 0xC0, 0xE2, 0xED, 0xF4, 0xFF))])
        data = bytes(data)
        text = data.decode("utf-8", "surrogateescape")
        # Each piece alone must give the ids that it gives in the whole.
        pieces = cutter.pre_tokenize_str("".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in text))
        ids = []
        for _, (start, end) in pieces:
            ids += mine.encode(text[start:end].encode("utf-8", "surrogateescape"), False)
        report.compare("invalid bytes", data, mine.encode(data, False), ids)
        if mine.decode(mine.encode(data, False)) != data:
            report.compare("invalid bytes, round trip", data, [], list(data))
    print(f"{count} strings with invalid bytes")
    mine.close()


def check_added(report, library, directory, rng, rounds):
    """Random tokenizer.json files with added tokens of all flags; texts made of their contents."""
    count = 0
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(rounds):
            theirs = reference(directory, add_prefix_space=rng.random() < 0.3)
            theirs.add_tokens([random_added(rng) for _ in range(rng.randint(1, 8))])
            file = pathlib.Path(temporary) / "tokenizer.json"
            theirs.save(str(file), pretty=False)
            theirs = Tokenizer.from_file(str(file))
            mine = Bml(library, temporary)
            contents = [t.content for t in theirs.get_added_tokens_decoder().values()]
            for _ in range(200):
                text = random_added_text(rng, contents)
                for special in (False, True):
                    try:
                        want = encode(theirs, text, special)
                    except BaseException as e:  # tokens that overlap in white space can make it panic
                        if "bad split" not in str(e):
                            raise
                        continue
                    report.compare(f"added {theirs.get_added_tokens_decoder()} special={special}", text,
                                   mine.encode(text, special), want)
                    count += 1
            mine.close()
    print(f"{count} strings with random added tokens")


def check_transformers(report, library, directory):
    """vocab.json and merges.txt with the small files beside them, against AutoTokenizer."""
    from transformers import AutoTokenizer

    for extra in DIRECTORIES:
        with tempfile.TemporaryDirectory() as temporary:
            path = pathlib.Path(temporary)
            for name in ("vocab.json", "merges.txt"):
                shutil.copy(directory / name, path / name)
            (path / "config.json").write_text('{"model_type": "gpt2"}')
            for name, value in extra.items():
                (path / name).write_text(json.dumps(value))
            theirs, mine = AutoTokenizer.from_pretrained(temporary), Bml(library, temporary)
            for text in DIRECTORY_TEXTS + NASTY:
                for special in (False, True):
                    want = theirs(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
                    report.compare(f"files {extra} special={special}", text, mine.encode(text, special), want)
            mine.close()
    print(f"{len(DIRECTORIES)} directories against AutoTokenizer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--strings", type=int, default=100000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    library = ctypes.CDLL(str(pathlib.Path(args.library).resolve()))
    for function in (library.bml_free, library.bml_tokenizer_free):
        function.restype, function.argtypes = None, [ctypes.c_void_p]
    report, rng = Report(), random.Random(args.seed)
    strings = random_strings(args.seed, args.strings)
    for name, directory in VOCABULARIES.items():
        if directory.exists():
            check_vocabulary(report, library, name, directory, strings)
    check_invalid(report, library, VOCABULARIES["storyteller"], rng, args.strings // 5)
    check_added(report, library, VOCABULARIES["storyteller"], rng, 60)
    check_transformers(report, library, VOCABULARIES["storyteller"])
    print("no differences" if not report.failures else f"{report.failures} differences")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
