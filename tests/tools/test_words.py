"""The Hopper kernels and their neighbours use the field's terms (docs/glossary.md): words that once stood in their
place do not come back, in identifiers neither."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A word that is banned, and what is said in its place.
BANNED = {
    "announce": "arrive, expect, publish",
    "aux": "producer",
    "auxiliary": "producer",
    "duty": "role",
    "heavy": "exact",
    "lent": "free stage",
    "lest": "so that .. not",
    "light": "decaying",
    "rehearse": "warm-up of instructions",
    "rehearsal": "warm-up of instructions",
    "relay": "four-CTA cluster",
    "silent": "warm-up chunk",
    "speak": "makes output",
    "undecayed": "all exact",
}
PHRASES = {"joint tile": "", "in vain": "without result", "asked anew": "read again", "behind plan": "after plan"}
ENDINGS = ("", "s", "d", "ed", "r", "ment", "ments", "ing")


def words(line: str) -> list:
    """The words of a line in lower case; names are taken apart at underscores and capitals."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", line.replace("_", " "))
    return [part.lower() for part in parts]


def found_in(line: str) -> list:
    """(word, what to say) of each banned word or phrase of a line."""
    all_words = words(line)
    singular = [word[:-3] + "y" if word.endswith("ies") else word for word in all_words]
    forms = {stem + ending: (stem, say) for stem, say in BANNED.items() for ending in ENDINGS}
    hits = [forms[word] for word in singular if word in forms]
    text = f" {' '.join(all_words)} "
    return hits + [(phrase, say) for phrase, say in PHRASES.items() if f" {phrase} " in text]


def test_names_are_taken_apart():
    assert words("kAuxGroups heavy_merge, UT transform") == ["k", "aux", "groups", "heavy", "merge", "ut", "transform"]
    assert [word for word, _ in found_in("heavies, kDuties: a silentChunk rehearsed in vain")] == [
        "heavy", "duty", "silent", "rehearse", "in vain",
    ]  # fmt: skip
    assert found_in("delight, lightly, auxiliaryless, listed, violent") == []


def test_the_cuda_sources_and_their_pages_use_the_terms_of_the_glossary():
    folders = [ROOT / "src" / "cuda", ROOT / "tests" / "cpp", ROOT / "benchmarks" / "cpp"]
    files = [path for folder in folders for path in folder.rglob("*")] + [*(ROOT / "docs" / "kernels").glob("*.md")]
    problems = [
        f"{path.relative_to(ROOT)}:{number}: {word} ({say})"
        for path in sorted(files)
        if path.is_file()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for word, say in found_in(line)
    ]
    assert not problems, "\n".join(problems)
