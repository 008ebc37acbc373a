"""Tokenizers: convert texts, chats and prompt-completion pairs to token ids and a loss mask.

- ``base``: the protocol ``Tokenizer``, and its settings.
- ``open_tokenizer``: opens the tokenizer that settings describe.
- ``bytes_tokenizer``: UTF-8 bytes as ids. It needs no vocabulary.
- ``callable_tokenizer``: a function of the user, by its import path.
- ``tokenizer_json``: a tokenizer.json file, read by the library ``tokenizers``.
- ``folder_files``: the files beside it.
- ``transformers_tokenizer``: a tokenizer object of transformers.
- ``processors/``: tokenizers of chats with images.
- ``chat``: reads messages, and keeps marker tokens in them apart from those of templates.
- ``chat_template``: Jinja templates of model authors, in a sandbox.
- ``chat_marks``: marks in a rendered text, which tell the message that a piece of it belongs to.
- ``chat_spans``: renders a chat to one text, and finds the spans of the text that are learned.
- ``token_ids``: checks that a sequence of ids is valid.
- ``rejections``: warnings about rejected samples, each once.

A text becomes ``Encoded``: ids and perhaps a loss mask. A sample that cannot be encoded becomes a reason, one word that
is counted. A tokenizer has a digest, so that a broker notices a change of tokenizer. Tokenizers know texts and ids.
They do not know files, streams or fields.
"""
