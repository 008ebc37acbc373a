"""Tokenizers: text, chats and pairs to token ids, and which of the ids are learned.

- ``base``: what a tokenizer is, and its settings.
- ``open_tokenizer``: from settings to a tokenizer.
- ``bytes_tokenizer``: UTF-8 bytes as ids. It needs no vocabulary.
- ``callable_tokenizer``: a function of the user, by its import path.
- ``tokenizer_json``: a tokenizer.json file, by the ``tokenizers`` library.
- ``transformers_tokenizer``: a tokenizer object of transformers.
- ``rejections``: warnings about rejected samples, each once.
- ``chat``: a list of messages to one text, and the spans of the text that are learned.
- ``chat_template``: Jinja templates of model authors, in a sandbox.
- ``token_ids``: what a valid sequence of ids is.

A tokenizer has a digest, so that a broker notices another tokenizer. Tokenizers know texts and ids. They do not know
files, streams or fields.
"""
