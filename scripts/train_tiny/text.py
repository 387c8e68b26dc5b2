"""From a documentation package's markup to plain text: reStructuredText, HTML and pod."""

from __future__ import annotations

import re
from html.parser import HTMLParser

SKIPPED_TAGS = {"script", "style", "table", "nav", "head", "form", "svg", "button"}
SKIPPED_CLASSES = {"navheader", "navfooter", "toc", "nosearch", "sphinxsidebar", "nav", "menu", "headerlink",
                   "fancy_toc", "footnotes", "list-of-examples", "indexterm", "imgcontainer"}  # fmt: skip
SKIPPED_IDS = {"hd", "ft", "sidebar", "global-nav", "searchbox", "toc_sub"}
BLOCK_TAGS = {"p", "div", "ul", "ol", "dl", "dt", "dd", "li", "pre", "blockquote", "section", "tr", "h1", "h2", "h3",
              "h4", "h5", "h6", "hr", "center"}  # fmt: skip
VOID_TAGS = {"br", "hr", "img", "link", "meta", "input", "col", "wbr", "area", "base"}


class _HtmlText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.current = ""
        self.prefix = ""
        self.pre = False
        self.term = False
        self.skipped: list[str] = []  # the open tags from the one that began the skipping

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            if tag not in VOID_TAGS:
                self.skipped.append(tag)
            return
        values = {k: v or "" for k, v in attrs}
        classes = set(values.get("class", "").split())
        if tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES or values.get("id") in SKIPPED_IDS:
            if tag not in VOID_TAGS:
                self.skipped.append(tag)
            return
        if tag == "br":
            self.current += "\n" if self.pre else " "
        elif tag in BLOCK_TAGS:
            self.flush()
            self.term = tag == "dt"  # Sphinx sets signatures in several pieces of code
            if tag == "pre":
                self.pre = True
            if tag in {"h1", "h2", "h3", "h4", "h5"}:
                self.prefix = "# "
            elif tag == "li":
                self.prefix = "* "
        elif tag in {"code", "tt"} and not (self.pre or self.term):
            self.current += "`"

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            if tag in self.skipped:  # tolerate tags left open inside
                while self.skipped and self.skipped.pop() != tag:
                    pass
            return
        if tag in BLOCK_TAGS:
            self.flush()
            if tag == "pre":
                self.pre = False
            if tag in {"h1", "h2", "h3", "h4", "h5", "li"}:
                self.prefix = ""
        elif tag in {"code", "tt"} and not (self.pre or self.term):
            self.current += "`"

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.current += data

    def flush(self) -> None:
        text = self.current.strip("\n").rstrip() if self.pre else re.sub(r"\s+", " ", self.current).strip()
        text = text.replace("¶", "").replace("``", "`").removesuffix("[source]")
        if text.strip("` "):
            self.blocks.append(self.prefix + text)
            self.prefix = ""
        self.current = ""


def html_text(source: str) -> str:
    """The readable text of a page: headings as ``# ``, list items as ``* ``, tables and navigation left out."""
    parser = _HtmlText()
    parser.feed(source)
    parser.close()
    parser.flush()
    return "\n\n".join(parser.blocks)


ROLE = re.compile(r":[a-zA-Z:+-]+:`([^`]+)`")
DROPPED_DIRECTIVES = ("index", "module", "sectionauthor", "moduleauthor", "highlight", "highlightlang", "toctree",
                      "image", "figure", "only", "tabularcolumns", "currentmodule", "csv-table", "list-table",
                      "productionlist", "literalinclude", "include", "contents", "raw", "audit-event", "cssclass",
                      "rubric", "testsetup", "testcleanup")  # fmt: skip
VERSION_WORDS = {"versionadded": "New in version", "versionchanged": "Changed in version",
                 "deprecated": "Deprecated since version", "deprecated-removed": "Deprecated since version"}  # fmt: skip
ADMONITIONS = {"note": "Note:", "warning": "Warning:", "seealso": "See also:", "tip": "Tip:", "important": "Important:",
               "impl-detail": "CPython implementation detail:", "caution": "Caution:", "hint": "Hint:"}  # fmt: skip
NAMES = {"function", "class", "method", "data", "attribute", "exception", "classmethod", "staticmethod", "module",
         "decorator", "c:function", "c:type", "c:macro", "c:var", "c:member", "describe", "cmdoption", "option",
         "envvar", "opcode", "pdbcommand", "coroutinefunction", "coroutinemethod", "abstractmethod", "decoratormethod",
         "awaitablefunction", "awaitablemethod"}  # fmt: skip


def _role_text(match: re.Match[str]) -> str:
    inside = match.group(1)
    label = re.match(r"(.+?)\s*<[^>]+>$", inside, re.DOTALL)
    if label:
        return label.group(1)
    return "`" + inside.lstrip("!~") + "`"


def _skip_body(lines: list[str], index: int, indent: int) -> int:
    """The first line after the directive's body."""
    while index < len(lines) and (
        not lines[index].strip() or len(lines[index]) - len(lines[index].lstrip()) > indent
    ):
        index += 1
    return index


def rst_text(source: str) -> str:
    """Sphinx source as plain text: roles become `` `name` ``, directives a line of words, titles ``# ``."""
    lines = source.expandtabs(4).splitlines()
    out: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        underline = bool(re.fullmatch(r"([=\-~^\"'*#+.:_`])\1{2,}", stripped))
        directive = re.match(r"\s*\.\.\s+([a-zA-Z:-]+?)::\s*(.*)", line)
        index += 1
        if underline:
            if out and out[-1].strip() and not out[-1].startswith(("#", " ")) and indent == 0:
                out[-1] = "# " + out[-1]
        elif re.match(r"\s*[=-]{3,}\s+[=-]{3,}", line) or re.match(r"\s*[+|].*[+|]\s*$", line):
            continue
        elif directive:
            name, argument = directive.groups()
            pad = " " * indent
            if name in DROPPED_DIRECTIVES:
                index = _skip_body(lines, index, indent)
            elif name in VERSION_WORDS:
                out.append(f"{pad}{VERSION_WORDS[name]} {argument}:")
            elif name in ADMONITIONS:
                out.append(f"{pad}{ADMONITIONS[name]} {argument}".rstrip())
            elif name in NAMES or (
                argument
                and name
                not in {
                    "code-block",
                    "doctest",
                    "testcode",
                    "sourcecode",
                    "code",
                    "parsed-literal",
                }
            ):
                out.append(f"{pad}{argument}")
        elif re.match(r"\s*\.\.(\s|$)", line):
            index = _skip_body(lines, index, indent)
        elif re.match(r"\s+:(noindex|module|platform|synopsis|class|name|caption|hidden|maxdepth|async|start-\w+|"
                      r"linenos|emphasize-lines|lineno-start|force|option|options|hide|noindexentry)\b.*:", line):  # fmt: skip
            continue
        else:
            out.append(line.rstrip())
    text = ROLE.sub(_role_text, "\n".join(out)).replace("``", "`")
    text = re.sub(r"`([^`<]+?)\s*<https?://[^>]+>`_+", r"\1", text)
    text = re.sub(r"\\([ *`|_\\])", r"\1", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = re.sub(r"^:$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^-{6,}$", "", text, flags=re.MULTILINE)
    return "\n\n".join(_unwrapped(block) for block in re.split(r"\n\s*\n", text.strip("\n")))


def _unwrapped(block: str) -> str:
    """A paragraph of prose on one line; a block that looks like code, a list or a table as it was."""
    lines = block.rstrip().split("\n")
    marker = re.match(r"\s*([*+-]|#\.|\d+\.)\s+", lines[0])
    body = lines[1:] if len(lines) > 1 else []
    first = len(marker.group()) if marker else len(lines[0]) - len(lines[0].lstrip())
    even = all(len(line) - len(line.lstrip()) == first for line in body)
    letters = sum(c.isalpha() or c.isspace() for c in block)
    prose = letters > 0.78 * len(block) and block.rstrip()[-1:] in tuple(".:!?)") and ">>>" not in block
    if not (body and even and prose):
        return block.rstrip()
    return " ".join([lines[0].rstrip(), *(line.strip() for line in body)])


def _pod_link(target: str) -> str:
    if "|" in target:
        return target.split("|", maxsplit=1)[0]
    page, _, section = target.partition("/")
    section = section.strip('"')
    return f'"{section}" in {page}' if page and section else section or page


def _pod_inline(text: str) -> str:
    for _ in range(4):  # nested codes, innermost first
        text = re.sub(r"\b[CFI]<<+ (.+?) >>+", r"`\1`", text, flags=re.DOTALL)
        text = re.sub(r"L<([^<>]+)>", lambda m: _pod_link(m.group(1)), text)
        text = re.sub(r"\b[CF]<([^<>]*)>", r"`\1`", text)
        text = re.sub(r"\b[BISX]<([^<>]*)>", lambda m: "" if m.group(0)[0] == "X" else m.group(1), text)
        text = re.sub(r"\bZ<>", "", text)
        for name, char in {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}.items():
            text = text.replace(f"E<{name}>", char)
    return text


def pod_text(source: str) -> str:
    """Perl's pod as plain text: ``=head`` as ``# ``, ``=item`` as ``* ``."""
    blocks: list[str] = []
    skipping = False
    for paragraph in re.split(r"\n\s*\n", source.expandtabs(8)):
        if paragraph.startswith(("=begin", "=for", "=encoding")):
            skipping = paragraph.startswith("=begin")
            continue
        if paragraph.startswith("=end"):
            skipping = False
            continue
        command = re.match(r"=(head\d|item)\s+(.*)", paragraph, re.DOTALL)
        if skipping or (paragraph.startswith("=") and not command):
            continue
        if command:
            kind, rest = command.groups()
            title = re.sub(r"\s+", " ", _pod_inline(rest)).strip()
            if title.strip("*- "):
                blocks.append(("# " if kind.startswith("head") else "* ") + title.lstrip("* "))
        elif paragraph.startswith((" ", "\n ")):
            blocks.append(paragraph.strip("\n").rstrip())
        elif paragraph.strip():
            blocks.append(_unwrapped(_pod_inline(paragraph.strip()).strip()))
    return "\n\n".join(blocks)
