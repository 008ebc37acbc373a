"""Files beside a tokenizer.json: the names of special tokens, and chat templates."""

import json
import re
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError


class FolderFiles:
    """Contents of the files that Hugging Face keeps in the folder of tokenizer.json; all of them may be missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                text = read_text(folder / name)
                try:
                    self._config |= json.loads(text)
                except (ValueError, TypeError) as error:
                    raise ConfigError(
                        f"tokenizer {folder / name}: got a file that is not a JSON object ({error}). Correct the file"
                    ) from error

    def token(self, key: str) -> str | None:
        """Return the text of a special token, such as ``eos_token``; None if the files do not name it."""
        named = self._config.get("extra_special_tokens")
        value = self._config.get(key) or (named.get(key) if isinstance(named, dict) else None)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def tokens(self) -> dict[str, str]:
        """Return all special tokens by name, as chat templates see them."""
        keys = [key for key in sorted(self._config) if re.fullmatch("[a-z_]+_token", key)]
        return {key: token for key in keys if (token := self.token(key)) is not None}

    def templates(self, text: str | None, *, processor: bool = False) -> dict[str, str]:
        """Return the texts of the chat templates by name, ``default`` and perhaps ``tool_use``; {} without any.

        ``text``: path or text of a template that replaces those of the folder. ``processor``: the folder is that of a
        processor, whose template may be in chat_template.json.
        """
        if text is not None:
            return {"default": text if "{" in text or "\n" in text else read_text(Path(text).expanduser())}
        if (self._folder / "chat_template.jinja").is_file():
            more = sorted((self._folder / "additional_chat_templates").glob("*.jinja"))
            default = self._folder / "chat_template.jinja"
            return {"default": read_text(default)} | {path.stem: read_text(path) for path in more}
        template = self._config.get("chat_template")
        if processor and (self._folder / "chat_template.json").is_file():
            template = json.loads(read_text(self._folder / "chat_template.json")).get("chat_template", template)
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
        return {"default": template} if isinstance(template, str) else {}


def read_text(path: Path) -> str:
    """Return the text of a file of the tokenizer. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"tokenizer: {path}: cannot be read: {reason}: correct the path") from error
