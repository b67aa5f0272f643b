"""Make the corpus of this record: English technical text of Debian's documentation packages, and more if given.

    python corpus.py FOLDER [MORE.parquet ...]

FOLDER gets the packages (packages/), one .jsonl for each source (text/), and sources.md, a table of what is in them.
Needs apt-get with Debian 12's lists (apt-get update) and dpkg-deb; no package is installed. Then, from the root:

    python fineweb.py --input FOLDER/text --tokenizer bytes --out-dir FOLDER/tokens

The order is that of the table, and within a source that of the paths, so the same packages give the same bytes.
"""

import gzip
import hashlib
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

DOC = "usr/share/doc"
# package: (version, license, where its text is: regular expressions of paths in it)
PACKAGES = {
    "linux-doc-6.1": ("6.1.192-2", "GPL-2 and others", rf"{DOC}/linux-doc-6.1/Documentation/(?!translations/).*\.(rst|txt)(\.gz)?"),
    "perl-doc": ("5.36.0-7+deb12u4", "GPL-1+ or Artistic", r".*/pod/.*\.pod|usr/share/man/man3/.*"),
    "python3.11-doc": ("3.11.2-6+deb12u9", "PSF-2", rf"{DOC}/python3.11/html/_sources/.*\.rst\.txt"),
    "postgresql-doc-15": ("15.20-0+deb12u1", "PostgreSQL", rf"{DOC}/postgresql-doc-15/html/(?!bookindex).*\.html"),
    "manpages": ("6.03-2", "GPL-2+ and others", r"usr/share/man/.*"),
    "manpages-dev": ("6.03-2", "GPL-2+ and others", r"usr/share/man/.*"),
    "anarchism": ("15.3-3", "GPL-2+", rf"{DOC}/anarchism/markdown/.*\.md(\.gz)?"),
    "libreoffice-help-en-us": ("4:7.4.7-1+deb12u14", "MPL-2.0 and others", r"usr/share/libreoffice/help/en-US/text/.*\.html"),
    "rust-doc": (
        "1.63.0+dfsg1-2",
        "MIT or Apache-2.0",
        rf"{DOC}/rust-doc/html/(book|cargo|clippy|edition-guide|embedded-book|nomicon|reference|rust-by-example|rustc"
        r"|rustdoc|unstable-book)/(?!first-edition|second-edition|2018-edition)(?!.*print\.html).*\.html",
    ),
    "git-doc": ("1:2.39.5-0+deb12u3", "GPL-2 and others", rf"{DOC}/git-doc/.*\.txt"),
    "fortunes": ("1:1.99.1-7.3", "BSD; quotations", r"usr/share/games/fortunes/[a-z-]+"),
    "octave-doc": ("7.3.0-2", "GPL-3+ and others", rf"{DOC}/octave/(octave|liboctave)\.html/(?!XREF|index-).*\.html"),
    "debian-policy": ("4.6.2.0", "GPL-2+", rf"{DOC}/debian-policy/policy\.html/_sources/.*\.rst\.txt"),
    "developers-reference": ("12.18", "GPL-2+", r"usr/share/developers-reference/_sources/.*\.rst\.txt"),
    "debian-handbook": ("11.20220922", "GPL-2+ or CC-BY-SA-3.0", rf"{DOC}/debian-handbook/html/en-US/.*\.html"),
    "debian-reference-en": ("2.100", "GPL-2+", r"usr/share/debian-reference/.*\.en\.html"),
    "sqlite3-doc": ("3.40.1-2+deb12u2", "public domain", rf"{DOC}/sqlite3/(?!keyword_index|sitemap|doclist).*\.html"),
    "python-django-doc": (
        "3:3.2.25-0+deb12u7",
        "BSD-3-Clause",
        rf"{DOC}/python-django-doc/html/(?!genindex|py-modindex|search|_modules/).*\.html",
    ),
    "vim-runtime": ("2:9.0.1378-2+deb12u2", "Vim", r"usr/share/vim/vim90/doc/.*\.txt"),
}
SHORTEST = 200  # characters: shorter pages are stubs that lead elsewhere
LOWEST_RATIO = 0.15  # of compressed to plain: below are tables, indexes and lists of the same line
CONTENT = re.compile('<main>.*</main>|<div id="DisplayArea".*|<div id="bd".*?(?=<div [^>]*id="sidebar"|<div id="ft")', re.S)  # else the whole page
SKIPPED_TAGS = {"head", "script", "style", "nav", "header", "footer", "aside", "svg", "button", "select"}
SKIPPED_CLASSES = re.compile(r"(?<![\w-])(navheader|navfooter|docnav|nav|toc|header|headerlink|menu|footer)(?![\w-])")
BLOCK_TAGS = set("p div li tr dt dd pre h1 h2 h3 h4 h5 h6 ul ol dl table section article blockquote br hr".split())
VOID_TAGS = set("area base br col embed hr img input link meta source track wbr".split())


class TextOfHtml(HTMLParser):
    """Collects what a reader sees of a page, without its navigation."""

    def __init__(self):
        super().__init__()
        self.parts, self.open, self.skipping = [], [], 0

    def handle_starttag(self, tag, attrs):
        if tag in BLOCK_TAGS:
            self.parts.append("\n" if tag in ("br", "li", "tr", "div") else "\n\n")
        if tag in VOID_TAGS:
            return
        skipped = tag in SKIPPED_TAGS or bool(SKIPPED_CLASSES.search(dict(attrs).get("class") or ""))
        self.open.append((tag, skipped))
        self.skipping += skipped

    def handle_endtag(self, tag):
        if tag in (name for name, _ in self.open):  # what is left open inside it ends here, too
            while True:
                name, skipped = self.open.pop()
                self.skipping -= skipped
                if name == tag:
                    break
        if tag in BLOCK_TAGS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skipping:
            in_pre = any(tag == "pre" for tag, _ in self.open)
            self.parts.append(data if in_pre else re.sub(r"\s+", " ", data))


def text_of_html(page):
    parser, content = TextOfHtml(), CONTENT.search(page)
    parser.feed(content[0] if content else page)
    parser.close()
    return "".join(parser.parts)


def text_of_man(page):
    """A manual page without troff's requests: headings and paragraphs stay, fonts and definitions go."""
    start = re.search(r"^\.(TH|Dt) ", page, re.M)  # before it stand comments and the converter's definitions
    lines = []
    for line in page[start.start() if start else 0 :].split("\n"):
        if line.startswith((".SH", ".SS", ".Sh", ".Ss")):
            lines += ["", line[3:].strip().strip('"'), ""]
        elif re.match(r"[.'](TP|PP|P|LP|IP|HP|sp|Pp|It)\b", line):
            lines += ["", *re.findall(r'^[.\'](?:IP|It) "?([^"]*)', line)]
        elif re.match(r"\.([BI]|[BIR][BIR]|SM|SB) ", line):
            joined = "" if re.match(r"\.[BIR][BIR] ", line) else " "  # .BR printf (3) is printf(3)
            words = re.findall(r'"([^"]*)"|(\S+)', line.split(" ", 1)[1])
            lines.append(joined.join(quoted or word for quoted, word in words))
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&/,|^:%]|\\\".*", "", text)
    for escape, char in {r"\-": "-", r"\(bu": "*", r"\e": "\\", r"\(aq": "'", r"\(dq": '"', r"\(em": "--"}.items():
        text = text.replace(escape, char)
    return re.sub(r"\\[(*](..|\[.*?\])|\\\[.*?\]", "", text).replace("\\ ", " ")


def read_text(path):
    """The plain text of a file; "" if it is no text in UTF-8 or Latin-1."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if b"\0" in data:
        return ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "/man/man" in str(path):
        text = text_of_man(text)
    elif path.suffix == ".html":
        text = text_of_html(text)
    text = re.sub(r"[ \t\r]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def unpack(package, version, folder):
    """Download a package with apt-get and unpack it. Returns (its folder, its version)."""
    name = f"{package}_{version.replace(':', '%3a')}_all.deb"
    if not (folder / name).exists():
        asked = subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=folder)
        if asked.returncode:  # Debian keeps the newest version only; older ones are at snapshot.debian.org
            sys.exit(f"error: {package} {version} is not to be had. Put {name} into {folder} and repeat the command.")
    target = folder / package
    if not target.exists():
        subprocess.run(["dpkg-deb", "-x", folder / name, target], check=True)
    return target


def documents(package, wanted, folder):
    """(path in the package, text) of the files of a package that are wanted, in the order of their paths."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_symlink()}
    for name in sorted(paths):
        if re.fullmatch(wanted, name) and paths[name].is_file():
            yield f"{package}/{name}", read_text(paths[name])


def rows_of_parquet(file):
    import pyarrow.parquet

    for number, row in enumerate(pyarrow.parquet.read_table(file, columns=["text"]).to_pylist()):
        yield f"{Path(file).name}/{number}", row["text"]


def write(source, found, target, seen):
    """Write the documents that are worth it. Returns (number of documents, their bytes, {reason: number left out})."""
    count, size, left_out = 0, 0, {"short": 0, "repeats another": 0, "repeats itself": 0}
    with open(target, "w") as out:
        for name, text in found:
            data = text.encode()
            digest = hashlib.sha256(data).digest()
            if len(text) < SHORTEST:
                left_out["short"] += 1
            elif digest in seen:
                left_out["repeats another"] += 1
            elif len(zlib.compress(data)) < LOWEST_RATIO * len(data):
                left_out["repeats itself"] += 1
            else:
                seen.add(digest)
                count, size = count + 1, size + len(data)
                out.write(json.dumps({"id": name, "text": text}) + "\n")
    print(f"{source}: {count} documents, {size / 1e6:.1f} MB; left out: {left_out}", flush=True)
    return count, size


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, more = Path(sys.argv[1]).resolve(), sorted(sys.argv[2:])
    packages, texts = folder / "packages", folder / "text"
    packages.mkdir(parents=True, exist_ok=True)
    texts.mkdir(exist_ok=True)
    seen, table = set(), ["| source | version | documents | MB | license |", "|---|---|---|---|---|"]
    for number, (package, (version, license, wanted)) in enumerate(PACKAGES.items()):
        found = documents(package, wanted, unpack(package, version, packages))
        count, size = write(package, found, texts / f"{number:02}-{package}.jsonl", seen)
        table.append(f"| {package} | {version} | {count:,} | {size / 1e6:.1f} | {license} |")
    for number, file in enumerate(more, len(PACKAGES)):
        count, size = write(file, rows_of_parquet(file), texts / f"{number:02}-{Path(file).stem}.jsonl", seen)
        table.append(f"| {Path(file).name} | | {count:,} | {size / 1e6:.1f} | |")
    (folder / "sources.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
