#!/usr/bin/env python3
"""Writes tests/data/tokenizer: what `tokenizers` and `transformers` answer.

strings.json   "strings", and for each vocabulary "ids" of each string as plain text, "special" ids
               by index for those that differ when special tokens are parsed, and for the whole
               held-out corpus the number of ids and their hash ("corpus": plain and special)
added.json     "files": tokenizer.json with added tokens of all flags (tiny vocabulary), each with
               "cases" of [text, plain ids, special ids]; "directories": the same for what lies
               beside vocab.json and merges.txt, "vocab" and "merges" being shared
"""
import json
import pathlib
import random
import tempfile

from tokenizer_cases import (DIRECTORIES, DIRECTORY_TEXTS, END_OF_TEXT, NASTY, ROOT, VOCABULARIES, AddedToken,
                             Tokenizer, corpus, decoders, encode, fnv1a, models, pre_tokenizers, random_added,
                             random_added_text, random_strings, reference)

OUT = ROOT / "tests/data/tokenizer"


def write(name, value):
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n"
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / name).write_text(text)
    print(f"{OUT / name}: {len(text)} bytes")


def make_strings():
    strings = NASTY + random_strings(7, 2500, 10) + random_strings(8, 100, 80)
    out = {"strings": strings}
    for name, directory in VOCABULARIES.items():
        tokenizer = reference(directory)
        plain = [encode(tokenizer, text, False) for text in strings]
        special = [encode(tokenizer, text, True) for text in strings]
        whole = [encode(tokenizer, corpus(), flag) for flag in (False, True)]
        out[name] = {
            "ids": plain,
            "special": {str(i): s for i, (p, s) in enumerate(zip(plain, special)) if p != s},
            "corpus": {kind: {"count": len(ids), "fnv1a": f"{fnv1a(ids):016x}"}
                       for kind, ids in zip(("plain", "special"), whole)},
        }
    write("strings.json", out)


def tiny_vocabulary():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("<", "|"), ("|", ">"), ("e", "n"), ("en", "d"), ("Ġ", "Ġ"), ("h", "e"),
              ("l", "l"), ("he", "ll"), ("'", "s"), ("1", "1"), ("Ġ", "<"), ("Ċ", "Ċ")]
    tokens = alphabet + [a + b for a, b in merges] + [END_OF_TEXT]
    return {token: i for i, token in enumerate(tokens)}, merges


def tiny(add_prefix_space=False, use_regex=True):
    vocab, merges = tiny_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def answers(tokenizer, texts):
    out = []
    for text in texts:
        try:
            out.append([text, encode(tokenizer, text, False), encode(tokenizer, text, True)])
        except BaseException as e:  # tokens that overlap in white space can make it panic
            if "bad split" not in str(e):
                raise
    return out


def make_added():
    rng, files, directories = random.Random(11), [], []
    fixed = [[AddedToken("<w>", single_word=True), AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)],
             [AddedToken("<end", normalized=False), AddedToken("<|end", normalized=True), AddedToken("|>x", special=True)],
             [AddedToken("ab"), AddedToken("abab"), AddedToken("aba"), AddedToken(" b", lstrip=True, rstrip=True)]]
    for i in range(16):
        tokenizer = tiny(add_prefix_space=i % 4 == 3, use_regex=i % 8 != 5)
        tokenizer.add_tokens(fixed[i] if i < len(fixed) else [random_added(rng) for _ in range(rng.randint(1, 8))])
        text = tokenizer.to_str()
        tokenizer = Tokenizer.from_str(text)
        contents = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
        texts = [""] + [random_added_text(rng, contents) for _ in range(60)]
        files.append({"tokenizer": json.loads(text), "cases": answers(tokenizer, texts)})
    from transformers import AutoTokenizer

    vocab, merges = tiny_vocabulary()
    lines = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    for extra in DIRECTORIES:
        with tempfile.TemporaryDirectory() as temporary:
            path = pathlib.Path(temporary)
            (path / "vocab.json").write_text(json.dumps(vocab))
            (path / "merges.txt").write_text(lines)
            (path / "config.json").write_text('{"model_type": "gpt2"}')
            for name, value in extra.items():
                (path / name).write_text(json.dumps(value))
            tokenizer = AutoTokenizer.from_pretrained(temporary)
            ids = lambda text, special: tokenizer(text, split_special_tokens=not special)["input_ids"]
            directories.append({"files": extra, "cases": [[text, ids(text, False), ids(text, True)]
                                                          for text in DIRECTORY_TEXTS + NASTY[:80]]})
    write("added.json", {"files": files, "vocab": vocab, "merges": lines, "directories": directories})


if __name__ == "__main__":
    make_strings()
    make_added()
