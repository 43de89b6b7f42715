"""The strings that tokenizer_goldens.py and tokenizer_check.py use, and the reference tokenizers."""
import json
import lzma
import pathlib
import random

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
VOCABULARIES = {"gpt2": SHARED / "gpt2-tokenizer", "storyteller": ROOT / "models/storyteller"}
END_OF_TEXT = "<|endoftext|>"

# From 0.21.2 on, tokenizers knows Unicode 16.
assert tuple(int(n) for n in tokenizers.__version__.split(".")[:3]) >= (0, 21, 2)

NASTY = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "a", " a", "  a", "   a", "a ", "a  ",
    "a   b", "a \n b", "a\n\n\nb", "\n\n  \n\ta", "a\u00a0b", "\u00a0\u00a0a", " \u00a0a", "\u00a0 a",
    "a\u0085b", "\u0085\u0085x", "\u2028a\u2029 b", "\u3000\u3000字", " \u3000字", "\u1680x\u2000y\u200ay",
    "\u202fx \u205fy", "\u200bx", "\ufeffx", "x\x0b\x0cy", "\x1c\x1d\x1e\x1fx", "\u180ex",
    "e\u0301te\u0301", " \u0301a", "a\u0308\u0327 b", "न\u093cमस\u094dते दुनिया", "สวัสดีชาวโลก", "ภาษาไทย 123",
    "你好,世界!", "こんにちは世界。", "안녕하세요 세계", "العربية ١٢٣", "עברית שלום", "Ελληνικά ΑΒΓ", "Русский язык",
    "😀", " 😀😀", "👩‍👩‍👧‍👦", "🏳️‍🌈 flag", "👍🏽 ok", "🇩🇪🇫🇷", "a😀b", "1️⃣2️⃣",
    "123", " 123", "1 2 3", "12a34", "½¾ ⅓", "Ⅳ ⅷ", "٣٤٥", "①②③", "²³x", "3.14159", "1,000,000", "0x1F",
    "don't", "DON'T", "we'll", "WE'LL", "I'm", "I'M", "they've", "you're", "YOU'RE", "he'd", "it's",
    "it'S", "'s", "''s", "'''s", " 's", "'ll'll", "'lll", "'r'v'l", "'re've", "can't've", "’s it’s",
    "a's's", "1's", "'t1", "' t", "'\n", "'", "''", "\x00", "a\x00b", "\x00\x00\x00", " \x00 ",
    "\x01\x02\x7f", "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext|><|endoftext|>",
    "<|endoftext|", "<|endoftext|>\n", "|>", "<<|endoftext|>>", "hello world", "Hello, World!", "Hello\tWorld",
    "The quick brown fox jumps over the lazy dog.", "camelCase snake_case kebab-case", "def f(x):\n    return x\n",
    "http://example.com/a?b=c&d=e#f", "a" * 100, "ab" * 60, " " * 100, "\n" * 50, "^" * 80, "-" * 130,
    "=" * 300, "A" * 65, "é" * 40, "字" * 33, "😀" * 17, " " * 64 + "x", "\u00a0" * 20 + "x", "0123456789" * 13,
    "\U0001d400\U0001d401", "\U00020000\U0002a6d6", "\U000e0001\U000e0041", "\U0010ffff", "\U000f0000x",
    "\ud7ff\ue000", "\ufffd", "\ufffe\uffff", "ſ ß ẞ ı İ", "ǅ ǈ", "ª º", "_a_ __b", "$5 €5 £5", "a-b--c---d",
    "\u0378\u0379", "\u1c89\u1c8a", "\ua7da\ua7dc", "\U00010d40\U00010d4a", "\U000105c0", "\U00016d40\U00016d70",
    "\U0001ccf0\U0001ccf9", "\u088f", "\U00011de0", "\u24b6\u24e9", "\u200c\u200d", "‿a⁀b",
]

# Directories of vocab.json and merges.txt: the small files that lie beside them.
DIRECTORIES = [
    {},
    {"tokenizer_config.json": {"add_prefix_space": True}},
    {"added_tokens.json": {"<user>": 50258, "<pad>": 50257},
     "special_tokens_map.json": {"pad_token": "<pad>", "eos_token": END_OF_TEXT}},
    {"special_tokens_map.json": {"pad_token": {"content": "<pad>", "lstrip": True, "rstrip": False,
                                               "normalized": True, "single_word": False},
                                 "additional_special_tokens": ["<a>", "<b>"]}},
    {"tokenizer_config.json": {"pad_token": "<p>", "added_tokens_decoder": {
        "50258": {"content": "<user>", "lstrip": False, "rstrip": True, "normalized": False,
                  "single_word": False, "special": False},
        "50257": {"content": "<p>", "lstrip": False, "rstrip": False, "normalized": False,
                  "single_word": False, "special": True}}},
     "added_tokens.json": {"<ignored>": 50300}},
]
DIRECTORY_TEXTS = ["a<pad> <user>b  <p> <a><b>c<ignored><|endoftext|> <user> d", "hello", " <pad>", "\tx", "<pad>"]

# Ranges that random text draws from: one by one, so that every kind of neighbourhood turns up.
RANGES = [(0x20, 0x7F), (0x20, 0x7F), (0x61, 0x7B), (0x61, 0x7B), (0x30, 0x3A), (0x00, 0x20), (0x80, 0x100),
          (0x100, 0x250), (0x300, 0x370), (0x370, 0x600), (0x600, 0x900), (0x900, 0x1100), (0x1100, 0x2000),
          (0x2000, 0x2070), (0x2070, 0x2100), (0x2100, 0x3000), (0x3000, 0x3100), (0x4E00, 0xA000),
          (0xA000, 0xD800), (0xE000, 0x10000), (0x10000, 0x11000), (0x11000, 0x20000), (0x1D400, 0x1D800),
          (0x1F000, 0x20000), (0x20000, 0x30000), (0x30000, 0x40000), (0xE0000, 0xE0200), (0x0, 0x110000)]
SPACES = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2000\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
SNIPPETS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", " '", "  ", " ", "\n", "\n\n", "the",
            " the", "ing", "123", "<|endoftext|>", "e\u0301", "👩‍👩‍👧", "\x00", "\ufffd", "...", "--"]


def random_string(rng, longest=24):
    """A string of 1 to LONGEST parts over all planes: characters, white space and snippets."""
    low, high = rng.choice(RANGES)
    out = []
    for _ in range(rng.randint(1, longest)):
        kind = rng.random()
        if kind < 0.12:
            out.append(rng.choice(SPACES))
        elif kind < 0.24:
            out.append(rng.choice(SNIPPETS))
        else:
            if rng.random() < 0.5:
                low, high = rng.choice(RANGES)
            c = rng.randrange(low, high)
            if not 0xD800 <= c < 0xE000:
                out.append(chr(c))
    return "".join(out)


def random_strings(seed, count, longest=24):
    rng = random.Random(seed)
    return [random_string(rng, longest) for _ in range(count)]


def random_added(rng):
    parts = ["<", ">", "a", "ab", " ", "  ", "x", "é", "字", "\u3000", "<|", "|>", "end", "\n", "s", "'s", "1", "_"]
    content = "".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))
    flag = lambda: rng.random() < 0.3
    return AddedToken(content, single_word=flag(), lstrip=flag(), rstrip=flag(), normalized=flag(), special=flag())


def random_added_text(rng, contents):
    return "".join(rng.choice((rng.choice(contents), random_string(rng, 2), rng.choice(SPACES), rng.choice("ab_<>x1")))
                   for _ in range(rng.randint(1, 10)))


def read_vocabulary(directory):
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    return vocab, [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]


def reference(directory, add_prefix_space=False):
    """What transformers makes of vocab.json and merges.txt."""
    vocab, merges = read_vocabulary(directory)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def encode(tokenizer, text, parse_special):
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer.encode(text, add_special_tokens=False).ids


def corpus():
    """The held-out text, or None where it is not there."""
    path = SHARED / "corpus/valid.txt.xz"
    return lzma.open(path).read().decode("utf-8") if path.exists() else None


def fnv1a(ids):
    """64-bit FNV-1a over the ids as little-endian 32-bit integers."""
    h = 0xCBF29CE484222325
    for byte in b"".join(i.to_bytes(4, "little") for i in ids):
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h
