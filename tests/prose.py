"""Check the project's prose: ``python -m tests.prose [PATH ...]``.

Read Markdown, docstrings, comments and the string literals that a person may see. Report sentences that are too long,
openings that make a reader stumble, and words for which the glossary (docs/reference/glossary.md) has another.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = 25  # words in a sentence
# Prose that is checked, and what is exempt from it: records of the past, and texts of others.
CHECKED = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/",
    "deploy/",
    "examples/",
    "streampack/",
    "services/",
)
EXEMPT = ("services/streampack_services/web/vendor/", "services/streampack_services/deploy/")

OPENING = re.compile(r"(Of|What|Whose|Whether|Those|That of|As many as|Why|Whoever|Whatever)\b(?!.*\?$)")
WORDS = {
    r"\bnobody's\b": "no owner: say padding",
    r"\bhungr(y|ier|iest)\b": "say longest data wait",
    r"\bstarv(e|es|ed|ing)\b": "say waits for data",
    r"\bhearken|\bwhence\b|\bthereof\b|\bwherein\b": "say it plainly",
    r"\bis no (message|number|file|sample|key|step)\b": "say 'is not a ...'",
    r"\btwin of\b": "say what differs",
}
Piece = tuple[int, str]  # line, text of one paragraph


def markdown(text: str) -> Iterator[Piece]:
    """Yield the paragraphs, list items, headings and table cells of a Markdown text, without its code."""
    text = re.sub(r"<!--.*?-->|^---\n.*?\n---\n", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    start, lines, fence = 0, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.strip()
        if bare.startswith(("```", "~~~")):
            fence, bare = not fence, ""
        elif fence or bare.startswith((":::", "!!! ", "??? ", "<")):
            bare = ""
        begins = re.match(r"([-*+]|\d+\.|#+|>|\|)\s", bare + " ")
        if lines and (not bare or begins):
            yield start, " ".join(lines)
            lines = []
        if bare.startswith("|"):
            yield from ((number, cell) for cell in bare.strip("|").split("|"))
        elif bare:
            start = start if lines else number
            lines.append(bare[begins.end() - 1 :].strip() if begins else bare)


def docstring(text: str, line: int) -> Iterator[Piece]:
    """Yield the paragraphs and the entries of the sections of a docstring, without examples and literal blocks."""
    start, lines, literal = line, list[str](), 0
    for number, full in enumerate([*text.splitlines(), ""], line):
        bare, indent = full.strip(), len(full) - len(full.lstrip())
        if literal and bare and indent >= literal:
            continue
        literal = 0 if bare else literal
        entry = re.match(r"[-*] ", bare)
        if indent and not entry:
            entry = re.match(r"([\w*., ]+|[A-Z]\w+( [a-z]+)?)(\([^)]*\))?: ", bare)
        if lines and (not bare or entry or bare.startswith(">>>") or lines[-1].endswith("::")):
            yield start, " ".join(lines).removesuffix("::")
            literal, lines = (4 if lines[-1].endswith("::") else 0), []
            if literal and bare and indent >= 4:
                continue
        if bare.startswith((">>>", "...", "| ", "+-")) or (full.startswith("    ") and "  " in bare):
            continue
        if bare:
            start = start if lines else number
            lines.append(bare[entry.end() :] if entry else bare)


def python(text: str) -> Iterator[Piece]:
    """Yield the docstrings, comments and string literals of four words or more of a Python module."""
    tree = ast.parse(text)
    skip = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                skip.add(id(first.value))
                yield from docstring(ast.get_docstring(node) or "", first.lineno)
        if isinstance(node, ast.JoinedStr):
            skip.update(id(part) for part in ast.walk(node) if part is not node)
            value = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            value = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,} ", value)) >= 4 and id(node) not in skip:
            yield from ((node.lineno, part) for part in re.split(r"\n\s*\n|\n\s*[-*|] |\n {4,}", value))
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            start = start if lines else token.start[0]
            lines.append(token.string.lstrip("# "))
        elif token.type not in (tokenize.NL, tokenize.COMMENT) and lines:
            yield start, " ".join(lines)
            lines = []


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with one paragraph."""
    text = re.sub(r"``.*?``|`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|https?://\S+", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_A-Z`])|\n\n", text):
        words = re.findall(r"[A-Za-z][\w'.-]*", sentence)
        if len(words) > LONGEST:
            yield f"{len(words)} words in a sentence: {' '.join(words[:8])} ..."
        if (opening := OPENING.match(sentence.lstrip("*_\"'( "))) and len(words) > 1:
            yield f"opens with {opening[1]!r}: {' '.join(words[:8])} ..."
        for pattern, advice in WORDS.items():
            if found := re.search(pattern, sentence, re.IGNORECASE):
                yield f"{found[0]!r}: {advice}"


def check(path: Path) -> Iterator[str]:
    """Yield the faults of a file, as ``path:line: fault``."""
    text = path.read_text(encoding="utf-8")
    pieces = python(text) if path.suffix == ".py" else markdown(text)
    for line, piece in pieces:
        for fault in faults(piece.strip()):
            yield f"{path.relative_to(ROOT)}:{line}: {fault}"


def main(arguments: list[str]) -> int:
    """Check the given files and folders, or all that are checked by default; return 1 if something is wrong."""
    listed = subprocess.run(["git", "ls-files", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [n for n in listed.stdout.splitlines() if n.startswith(CHECKED) and not n.startswith(EXEMPT)]
    found = [fault for name in names if name.endswith((".py", ".md")) for fault in check(ROOT / name)]
    print("\n".join(found) or f"prose of {len(names)} files: nothing to mend")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
